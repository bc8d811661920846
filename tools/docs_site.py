"""A hook of MkDocs: makes the pages of the site that are not files in docs/, and fits the others to the site.

It makes the first page, from README.md; contributing, changelog and license; a page for each example and each report
of a bench, so that links to them lead somewhere; the configuration reference, from the models in `gyre.config`; and the
Python reference, whose text mkdocstrings takes from docstrings. Nothing here imports torch or Ray.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gyre.config import Budget, Entrypoint, JobSpec  # noqa: E402
from gyre.config.sections import WorkloadSettings  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
}
"""Files at the root of the repository, and their pages."""

BUDGET = "failover.<budget>"
"""The heading of the keys that every budget has."""

STYLE = "assets/gyre.css"

LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", "": "dockerfile"}

PYTHON = {
    "Jobs": ("gyre.api.RLJobBuilder", "gyre.api.RLJob", "gyre.api.handle.JobHandle"),
    "What you subclass": (
        "gyre.workloads.BaseWorkload",
        "gyre.workloads.BaseTrainer",
        "gyre.workloads.WorkloadContext",
        "gyre.workloads.Progress",
        "gyre.workloads.operator",
        "gyre.config.sections.Section",
    ),
    "What a role's class has": ("gyre.workloads.protocols",),
    "What a trainer calls": ("gyre.workloads.handles",),
    "Samples and groups": ("gyre.rollouts.samples", "gyre.rollouts.trainer.staleness"),
    "Testing": (
        "gyre.testing.in_process.InProcessJob",
        "gyre.testing.contracts",
        "gyre.testing.processes.ProcessFaults",
    ),
    "Errors": ("gyre.errors",),
}
"""The headings of the Python reference, and what stands below each."""


# -- MkDocs' events ---------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add what mkdocs.yml cannot name: a style that is made here, and the function that makes anchors."""
    config.extra_css.append(STYLE)
    config.mdx_configs["toc"]["slugify"] = anchor_of
    return config


def anchor_of(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading, so that links hold in both places."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).lower()).strip().replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, STYLE, content="td:first-child code { white-space: nowrap; }\n"))
    for page, text in _made():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that hold on the site. The word behind a fence's language, which tells the tests what the
    block is, is left out."""
    at = page.file.src_uri
    source = _SOURCES.get(at, f"docs/{at}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = re.sub(r"\A```(\w+) \w+$", r"```\1", part, flags=re.MULTILINE)
        else:
            parts[index] = re.sub(
                r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", lambda link: _link(link, source, at), part
            )
    return "".join(parts)


_SOURCES = {page: path for path, page in PAGES.items()}
"""By page, the file of the repository that it is made from; links in it are relative to that."""


def _link(link: re.Match[str], source: str, page: str) -> str:
    """A link of the file `source`, as it is on `page`; only its text where the site has no such page."""
    image, text, target = link.groups()
    if "://" in target or target.startswith("#"):
        return link[0]
    path, _, anchor = target.partition("#")
    there = _page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
    if there is None:
        return text
    relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
    return f"{image}[{text}]({relative}{'#' if anchor else ''}{anchor})"


def _page_of(path: str) -> str | None:
    """The page or file of the site that shows this file of the repository."""
    if path in PAGES:
        return PAGES[path]
    folder, _, name = path.rpartition("/")
    if folder == "docs":
        return name
    if folder == "examples":
        return f"examples/{name}.md"
    if folder == "bench/results" and name.endswith(".md"):
        return f"results/{name}"
    return None


# -- the pages that are made ------------------------------------------------------------------------


def _made() -> Iterator[tuple[str, str]]:
    for path, page in PAGES.items():
        text = (ROOT / path).read_text()
        yield page, text if path.endswith(".md") else f"# License\n\n```text\n{text}\n```\n"
    for example in sorted((ROOT / "examples").iterdir()):
        if example.is_file():
            language = LANGUAGES[example.suffix]
            yield (
                f"examples/{example.name}.md",
                f"# {example.name}\n\n```{language}\n{example.read_text()}```\n",
            )
    for report in sorted((ROOT / "bench" / "results").glob("*.md")):
        page = f"results/{report.name}"
        _SOURCES[page] = f"bench/results/{report.name}"
        text = report.read_text()
        yield page, text if text.startswith("# ") else f"# {report.stem}\n\n{text}"
    yield "reference/configuration.md", _configuration()
    yield "reference/python.md", _python()


def _python() -> str:
    parts = [
        "# Python reference\n\nWhat you import, from docstrings. The pages of the documentation say how it is used.\n"
    ]
    for heading, names in PYTHON.items():
        parts.append(f"## {heading}\n")
        parts += [f"::: {name}\n" for name in names]
    return "\n".join(parts)


# -- the configuration reference --------------------------------------------------------------------


def _configuration() -> str:
    """A table for each model of the job file, from its fields: names, types, defaults and docstrings."""
    told = Docstrings()
    lines = [
        "# Configuration reference",
        "",
        "Every key of a job file, made from the models that check it. The builder's methods have the same names.",
        "[Operations](../operations.md#settings) says more of many of them.",
        "",
    ]
    for path, model in [
        *_sections("", JobSpec),
        (BUDGET, Budget),
        *_sections("config", WorkloadSettings),
    ]:
        lines += _table(path, model, told)
    return "\n".join(lines)


def _sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The model at this path of the job file, and those in it, each with its path. Those that are written as one value
    have no table."""
    yield path, model
    for name, field in model.model_fields.items():
        below, inner = _model_in(field.annotation)
        if inner is not None and inner not in (Entrypoint, Budget):
            yield from _sections(".".join(part for part in (path, name, below) if part), inner)


def _model_in(kind: Any) -> tuple[str, type[BaseModel] | None]:
    """The model that a field holds, and the word for its own key where the field is a mapping of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "", kind
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return "<name>", _model_in(arguments[1])[1]
    if origin is list:
        return "[]", _model_in(arguments[0])[1]
    if origin in (typing.Union, types.UnionType):
        return next((found for one in arguments if (found := _model_in(one))[1]), ("", None))
    return "", None


class Docstrings:
    """The docstrings of fields, read from source: pydantic keeps them only where a model asks for it."""

    def __init__(self) -> None:
        self._gyre = griffe.load("gyre.config", search_paths=[str(ROOT)], resolve_aliases=False)

    def of(self, model: type[BaseModel], name: str) -> str:
        for kind in model.__mro__:
            if not kind.__module__.startswith("gyre.config"):
                continue
            path = f"{kind.__module__}.{kind.__qualname__}".removeprefix("gyre.config.")
            member = self._gyre[path].members.get(name)
            if member is not None and member.docstring is not None:
                return " ".join(member.docstring.value.split())
        return ""


def _table(path: str, model: type[BaseModel], told: Docstrings) -> list[str]:
    rows = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        about = told.of(model, name)
        below, inner = _model_in(field.annotation)
        if inner is not None and inner is not Entrypoint:
            where = ".".join(part for part in (path, name, below) if part) if inner is not Budget else BUDGET
            about = about or _first_sentences(inner)
            about = f"{about} [Keys](#{anchor_of(where, '-')})"
        cells = (f"`{name}`", _type(field.annotation), _default(field), about)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [f"## {f'`{path}`' if path else 'The job'}", "", _first_sentences(model), "", *rows, ""]


def _first_sentences(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())


def _type(kind: Any) -> str:
    """The type in the words of a job file."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one) for one in arguments if one is not type(None))
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping to {_type(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "`module:Class`" if kind is Entrypoint else "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(kind, "anything")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Budget):
        attempts = f", {value.attempts} without progress" if value.attempts is not None else ""
        return f"{value.max} in {value.window_s:g} s{attempts}"
    if isinstance(value, BaseModel) or value in (None, "", [], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
