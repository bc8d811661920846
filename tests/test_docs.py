"""The documents tell the truth where a program can tell: snippets, command lines, links, names, tables."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from gyre import errors
from gyre.api.cli import INTERRUPTED, TERMINATED, VERBS, main
from gyre.api.definition.builder import RLJobBuilder
from gyre.api.definition.entrypoints import load_file
from gyre.api.definition.rl_job import RLJob
from gyre.api.definition.signatures import BROUGHT, CALLS_OF_A_CODEC, check_call
from gyre.api.handle import JobHandle
from gyre.api.rest.app import create_app
from gyre.config import (
    Budget,
    FailoverSpec,
    JobSpec,
    NotifySpec,
    RoleSpec,
    RolloutsSpec,
    RunSpec,
    SamplesSpec,
    SinkSpec,
    WeightsSpec,
)
from gyre.config.plugins import KINDS
from gyre.config.sections import WorkloadSettings
from gyre.config.yaml_text import read_yaml
from gyre.failover import Cause, JobPhase, Scope, commands, events
from gyre.failover.causes import CAUSES
from gyre.failover.state import Reason
from gyre.graph import RECIPES, EdgeKind
from gyre.store.tables import VERSION_TABLE, metadata
from tests.doubles.standing_job import StandingJob

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OPERATIONS = ROOT / "docs" / "operations.md"
JOURNAL = ROOT / "docs" / "journal.md"
SHELLS = ("bash", "console", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind` is the word behind its language, which pages do not show: what the block is. `name` is the
    file that its first line names, as `# word_job.py`; else empty."""

    page: Path
    line: int
    language: str
    text: str
    kind: str = ""

    @property
    def name(self) -> str:
        found = re.match(r"# (\w+\.py)$", self.text.partition("\n")[0])
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start, language, kind = None, "", ""
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start, (language, _, kind) = number, line[3:].strip().partition(" ")
        else:
            yield Block(page, start + 2, language, "\n".join(lines[start + 1 : number]) + "\n", kind)
            start = None
    assert start is None, f"{page.name}:{start}: a block is not closed"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SNIPPETS = [block for block in BLOCKS if block.language == "python"]
FILES = {block.name: block for block in SNIPPETS if block.name}


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans_of(page: Path) -> list[str]:
    """What stands between backticks in the prose, on one line or over two."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose_of(page))]


def table_under(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows of the tables under a heading, by the first cell's first code span."""
    text = page.read_text()
    assert f"\n{heading}\n" in text, f"{page.name} has no {heading!r}"
    section = text.split(f"\n{heading}\n", 1)[1]
    section = re.split(r"\n#{1,3} ", section, maxsplit=1)[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        for name in re.findall(r"`([^`]+)`", cells[0]) if line.startswith("|") else []:
            rows[name] = cells
    return rows


# -- snippets ---------------------------------------------------------------------------------------


@pytest.fixture
def shown_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The snippets that name a file, as files on the path."""
    folder = tmp_path / "shown"
    folder.mkdir()
    for name, block in FILES.items():
        (folder / name).write_text(block.text)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_a_snippet_compiles_and_its_imports_resolve(block: Block, shown_files: Path) -> None:
    tree = ast.parse(block.text, str(block))
    compile(tree, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block}: {node.module} has no {alias.name}"


KINDS_OF_BLOCKS = {
    "python": ("job", "driver", "module", "test", "graph", "signature"),
    "yaml": ("plan", "part"),
    **dict.fromkeys((*SHELLS, "text", "mermaid", "toml", "json"), ("",)),
}
"""By language, what a block may be: a `job` file, which is planned; a `driver` that goes on with its page's job; a
`module`, which is imported; a `test`, which passes; a `graph`, a job without its `config`; the `signature` of what a
user brings; a whole job to `plan`, or a `part` of one. The rest is read by its language alone."""


def of_kind(language: str, *kinds: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block.kind in kinds]


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        if "CHANGELOG" not in block.page.name:
            assert block.kind in KINDS_OF_BLOCKS[block.language], f"{block}: {block.language} {block.kind!r}"


@pytest.fixture
def on_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("GYRE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def planned(file: Path, *options: str) -> None:
    result = CliRunner().invoke(main, ["plan", str(file), *options])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("block", of_kind("python", "job"), ids=str)
def test_a_job_that_is_shown_is_planned_as_it_stands_without_a_warning(
    block: Block, shown_files: Path, on_no_cluster: None
) -> None:
    file = shown_files / (block.name or "shown_job.py")
    file.write_text(block.text)
    planned(file, "--strict")


@pytest.mark.parametrize("block", of_kind("python", "graph"), ids=str)
def test_a_graph_that_is_shown_compiles(block: Block) -> None:
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    assert names["job"].plan().plan.placements


@pytest.mark.parametrize("block", of_kind("python", "module"), ids=str)
def test_a_module_that_is_shown_can_be_imported(block: Block, shown_files: Path) -> None:
    file = shown_files / (block.name or "shown_module.py")
    file.write_text(block.text)
    load_file(file)


@pytest.mark.parametrize("block", of_kind("python", "signature"), ids=str)
def test_a_signature_that_is_shown_is_that_by_which_it_is_called(block: Block) -> None:
    names: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{block.text}", str(block), "exec"), names)
    groups = {"loss": "gyre.losses", "advantage": "gyre.advantages", "command": "gyre.engines"}
    found = [name for name in names if inspect.isfunction(names[name])]
    assert found
    for name in found:
        positional, keywords = BROUGHT[groups[name]] if name in groups else CALLS_OF_A_CODEC[name]
        check_call("shown", names[name], name, positional, keywords)


@pytest.mark.parametrize("block", of_kind("python", "driver"), ids=str)
def test_a_driver_that_is_shown_goes_on_with_its_pages_job(block: Block) -> None:
    """Its calls are of the job's and the handle's own. The slow tests run it."""
    assert any(job.page == block.page and job.line < block.line for job in of_kind("python", "job"))
    kinds = {"job": RLJob, "handle": JobHandle}
    called = [
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds
    ]
    assert called
    for name, attribute in called:
        assert hasattr(kinds[name], attribute), f"{block}: {name}.{attribute}"


SHORT = {r"\bsteps=\d+": "steps=2", r'"max_steps": \d+': '"max_steps": 2'}
"""By what they stand instead of, the numbers with which a shown job is short."""


def short(text: str) -> str:
    for pattern, replacement in SHORT.items():
        text = re.sub(pattern, replacement, text)
    return text


def ran(arguments: list[str], folder: Path, *, deadline_s: float = 110) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GYRE_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("block", [block for block in of_kind("python", "job") if not block.name], ids=str)
def test_a_job_that_is_shown_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(block.text)
    changes = ["run.steps=2", *(["config.warm_start.max_steps=2"] if "warm_start" in block.text else [])]
    options = [word for change in changes for word in ("--set", change)]
    done = ran(["-m", "gyre.api", "run", "job.py", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "succeeded" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(420)
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    """Its files are written and its commands run in their order, and the model learns what the page says."""
    page = ROOT / "docs" / "tutorial.md"
    for block in (block for block in BLOCKS if block.page == page):
        if found := re.match(r"# ([\w.]+)\n", block.text):
            (tmp_path / found[1]).write_text(block.text)
        for line in block.text.splitlines() if block.language == "console" else ():
            word, *words = shlex.split(line.removeprefix("$ "))
            if word == "kill":
                continue
            done = ran([*(["-m", "gyre.api"] if word == "gyre" else []), *words], tmp_path, deadline_s=300)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            if words[:1] == ["run"]:
                (accuracy,) = re.findall(r"held-out 0 % -> (\d+) %", done.stderr)
                assert int(accuracy) >= 90
    assert (tmp_path / "models" / "reviews" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("block", of_kind("python", "driver"), ids=str)
def test_a_driver_that_is_shown_runs(block: Block, tmp_path: Path) -> None:
    *_, job = (job for job in of_kind("python", "job") if job.page == block.page and job.line < block.line)
    (tmp_path / "driver.py").write_text(f"{short(job.text)}\n{block.text}")
    done = ran(["driver.py"], tmp_path)
    assert done.returncode == 0, done.stderr


WHOLE: dict[str, Any] = {
    "recipe": "grpo",
    "config": {
        "task": {},
        "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16},
        "optim": {"lr": 1e-3},
    },
    "roles": {"actor": {}, "rollout": {}, "reward": {}},
}
"""What a part is laid over."""


@pytest.mark.parametrize("block", of_kind("yaml", "plan", "part"), ids=str)
def test_yaml_that_is_shown_is_planned(block: Block, tmp_path: Path, on_no_cluster: None) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(block.text)
    if block.kind == "part":
        file.write_text(json.dumps(laid_over(WHOLE, read_yaml(block.text))))
    planned(file, "--ray-address", "head:6379", "--strict")  # its files are on other machines


def laid_over(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    inner = {
        key: laid_over(whole[key], value)
        if isinstance(value, dict) and isinstance(whole.get(key), dict)
        else value
        for key, value in part.items()
    }
    return {**whole, **inner}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("toml", "json")], ids=str)
def test_other_data_that_are_shown_can_be_read(block: Block) -> None:
    if block.language == "toml":
        tomllib.loads(block.text)
    else:
        json.loads(block.text)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("bash", "sh")], ids=str)
def test_a_script_that_is_shown_is_bash(block: Block) -> None:
    read = subprocess.run(
        ["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=60, check=False
    )
    assert read.returncode == 0, read.stderr


TESTS_SHOWN = [
    (name.removesuffix(".py"), function)
    for name, block in FILES.items()
    for function in re.findall(r"^def (test_\w+)", block.text, re.MULTILINE)
]


@pytest.mark.parametrize(("module", "function"), TESTS_SHOWN)
def test_a_test_that_is_shown_passes(module: str, function: str, shown_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    getattr(importlib.import_module(module), function)(folder)


def test_the_calls_that_are_shown_give_what_is_said(shown_files: Path, tmp_path: Path) -> None:
    from gyre.testing.in_process import InProcessJob

    calls, words = importlib.import_module("calls"), importlib.import_module("word_job")
    job = (
        RLJobBuilder()
        .config({"unit": "words"})
        .trainer(calls.Calls)
        .role("counter", words.Counter)
        .total(2)
        .build()
    )
    with InProcessJob(job.spec, tmp_path) as run:
        assert run.result(timeout_s=30) == {
            "everyone": [[2], [2]],
            "one": [2],
            "dealt": [1, 2, 1],
            "later": [[3], [3]],
            "streamed": 3,
        }


# -- command lines ----------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every `gyre …` of a block or a code span: where it stands, and its words behind `gyre`."""
    for block in BLOCKS:
        if block.language in SHELLS:
            for offset, line in enumerate(block.text.replace("\\\n", "  ").splitlines()):
                if found := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*gyre (.*)", line):
                    yield f"{block.page.name}:{block.line + offset}", words_of(found[1])
                for inner in re.findall(r"\$\(gyre ([^|)]*)", line):
                    yield f"{block.page.name}:{block.line + offset}", words_of(inner)
    for page in PAGES:
        for span in spans_of(page):
            if span.startswith("gyre "):
                yield f"{page.name}: `{span}`", words_of(span.removeprefix("gyre "))


def words_of(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words = []
    for word in lexer:
        if set(word) <= set("|&;>"):
            break
        words.append(word)
    return words


COMMAND_LINES = sorted({(where, tuple(words)) for where, words in command_lines()})


@pytest.mark.parametrize(
    ("where", "words"), COMMAND_LINES, ids=[f"{where} {' '.join(words)}" for where, words in COMMAND_LINES]
)
def test_a_command_line_parses(where: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_HOME", "/nowhere")  # --home sets it; put back afterwards
    for name in ("GYRE_URL", "GYRE_STORE", "GYRE_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    context = main.make_context("gyre", list(words), resilient_parsing=words in (("--help",), ("--version",)))
    rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
    if not rest:
        assert words[-1].startswith("-"), f"{where}: no verb"
        return
    name, command, arguments = main.resolve_command(context, rest)
    assert command is not None
    if not arguments and any(
        isinstance(param, click.Argument) and param.required for param in command.params
    ):
        return  # the verb is only named
    command.make_context(name, arguments, parent=context)


def test_there_are_command_lines_to_look_at() -> None:
    assert len(COMMAND_LINES) > 40


def test_every_verb_is_in_the_operations_page_and_no_other() -> None:
    told = {
        word.split()[1]
        for cells in table_under(OPERATIONS, "## Command line").values()
        for word in re.findall(r"`(gyre \w+[^`]*)`", " ".join(cells))
    }
    assert told == set(VERBS)


def test_every_make_target_that_is_named_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in PAGES:
        named |= {span.split()[1] for span in spans_of(page) if re.match(r"make [a-z]", span)}
    for block in BLOCKS:
        if block.language in SHELLS:
            named |= set(re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


# -- links, paths, names ----------------------------------------------------------------------------


def slugs_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert there.is_relative_to(ROOT)
        if anchor:
            assert anchor in slugs_of(there), f"{page.name}: {target}; there are {sorted(slugs_of(there))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_are_named_exist(page: Path) -> None:
    told = spans_of(page)
    for block in BLOCKS:
        if block.page == page and block.language in SHELLS:
            told += [word for line in block.text.splitlines() for word in re.split(r"[\s=\"']+", line)]
    first = {entry.name for entry in ROOT.iterdir()}
    for word in told:
        path = word.partition(":")[0]
        inside = "/" in path and path.split("/")[0] in first - {"bench"} | {"bench", ".ci"}
        beside = re.fullmatch(r"[A-Z][A-Za-z]+(\.md|\.toml)?|pyproject\.toml|constraints\.txt", path) and (
            path in first or path.endswith((".md", ".toml", ".txt"))
        )
        if (inside or beside) and not re.search(r"[<>*{}$]", path):
            assert (ROOT / path).exists(), f"{page.name}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_resolve(page: Path) -> None:
    text = prose_of(page) + "".join(block.text for block in BLOCKS if block.page == page)
    for name in set(re.findall(r"(?<![\w./~-])(gyre(?:\.[A-Za-z_]\w*)+(?::\w+)?)", text)):
        if name.endswith((".db", ".json", ".md")) or name in {kind.group for kind in KINDS}:
            continue
        parts = name.replace(":", ".").split(".")
        found: Any = importlib.import_module("gyre")
        for depth, part in enumerate(parts[1:], start=2):
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(".".join(parts[:depth]))


def test_nothing_is_said_of_where_it_was_written() -> None:
    for page in [*PAGES, ROOT / "LICENSE", *sorted((ROOT / "examples").iterdir())]:
        if page.is_file():
            assert not re.search(r"/work/|/root/|/tmp/|issue #?\d", page.read_text()), page.name


# -- tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("### `failover`", FailoverSpec),
        ("### `run`", RunSpec),
        ("### `rollouts`", RolloutsSpec),
        ("### `weights`", WeightsSpec),
        ("### `observe.samples`", SamplesSpec),
        ("### `observe.sinks`", SinkSpec),
        ("### `observe.notify`", NotifySpec),
        ("### `roles.<name>`", RoleSpec),
    ],
    ids=["failover", "run", "rollouts", "weights", "samples", "sinks", "notify", "roles"],
)
def test_every_setting_is_in_its_table_with_its_default(heading: str, model: type[BaseModel]) -> None:
    rows = table_under(OPERATIONS, heading)
    assert set(rows) >= set(model.model_fields)
    for name, cells in rows.items():
        if name not in model.model_fields:
            continue
        default = model.model_fields[name].get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Budget):
            attempts = f", {default.attempts} without a step" if default.attempts is not None else ""
            assert cells[1] == f"{default.max} in {default.window_s:g} s{attempts}", name
        elif isinstance(default, int | float) and not isinstance(default, bool):
            assert float(cells[1]) == default, name
        elif isinstance(default, str):
            assert cells[1] == f"`{default}`", name
        elif isinstance(default, BaseModel):
            for key, value in default:
                assert isinstance(value, dict) or f"`{key}` {value:g}" in cells[1], name


def test_the_tables_of_settings_hold_nothing_else() -> None:
    for heading, model in (
        ("### `failover`", FailoverSpec),
        ("### `run`", RunSpec),
        ("### `rollouts`", RolloutsSpec),
        ("### `weights`", WeightsSpec),
        ("### `observe.samples`", SamplesSpec),
        ("### `observe.sinks`", SinkSpec),
        ("### `observe.notify`", NotifySpec),
    ):
        assert set(table_under(OPERATIONS, heading)) == set(model.model_fields)


def test_every_key_below_config_is_in_its_table_with_its_default() -> None:
    elsewhere = (
        "loss",
        "reward",
        "data",
        "megatron",
        "fsdp",
        "critic",
    )  # pages of their own, with tests of their own
    fields: dict[str, Any] = {}
    for name, field in WorkloadSettings.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models:
            fields[name] = field
        elif name not in elsewhere:
            fields |= {f"{name}.{key}": one for key, one in models[0].model_fields.items()}
    rows = table_under(OPERATIONS, "### `config`")
    assert sorted(rows) == sorted(fields)
    for name, cells in rows.items():
        default = (
            None
            if fields[name].is_required()
            else fields[name].get_default(call_default_factory=True, validated_data={})
        )
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(cells[1]) == default, name
        elif isinstance(default, str):
            assert cells[1] == f"`{default}`", name
        elif fields[name].is_required():
            assert cells[1] == "must be given", name


def test_the_other_keys_of_a_job_are_named() -> None:
    section = OPERATIONS.read_text().split("### The job itself")[1].split("\n#")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) == set(JobSpec.model_fields) - {
        "roles",
        "run",
        "rollouts",
        "weights",
        "failover",
        "observe",
    }


def key_exists(model: type[BaseModel], parts: list[str]) -> bool:
    """Whether a model, or a section that it holds, has a key at this path. Below a mapping's own keys anything is."""
    if not parts:
        return True
    if parts[0] not in model.model_fields:
        return False
    kind = model.model_fields[parts[0]].annotation
    kinds = [kind, *getattr(kind, "__args__", ())]
    inner = [one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)]
    below = parts[2:] if parts[0] == "roles" else parts[1:]
    return not below or any(key_exists(one, below) for one in inner)


OF_VERL = ("critic.", "data.", "reward.", "reward_model.")
"""How names of verl's begin that would be sections here, on the page that has both."""


@pytest.mark.parametrize("name", ["from-verl.md", "troubleshooting.md", "limits.md"])
def test_the_keys_that_are_advised_are_there(name: str) -> None:
    """Each `section.key`, from the top of a job file or from the top of its `config`."""
    sections = {*JobSpec.model_fields, *WorkloadSettings.model_fields}
    keys = [
        parts
        for span in spans_of(ROOT / "docs" / name)
        if (parts := span.partition(":")[0].split("."))[0] in sections and len(parts) > 1
        if not (name == "from-verl.md" and span.startswith(OF_VERL))
    ]
    assert len(keys) > 1
    for parts in keys:
        if parts[0] == "config":
            assert key_exists(WorkloadSettings, parts[1:]), f"{name}: {'.'.join(parts)}"
        else:
            found = [key_exists(model, parts) for model in (JobSpec, WorkloadSettings)]
            assert any(found), f"{name}: {'.'.join(parts)}"


def test_every_warning_of_learning_is_in_the_troubleshooting_page() -> None:
    from gyre.workloads.trainer.learning.learning_watch import CODES

    told = set(spans_of(ROOT / "docs" / "troubleshooting.md"))
    assert set(CODES) <= told


def test_every_metric_is_in_its_table_and_no_other() -> None:
    from gyre.failover.evaluation import SHOWN
    from gyre.master.metrics import prometheus_text
    from gyre.workloads.trainer.learning.metric_names import METRICS

    with StandingJob() as job:
        view = job.view()
    shares = {"waits": {"a waits for b": 1.0}, "times": {"a": {"waits for b": 1.0}}}
    view["training"]["last"] = dict.fromkeys((*METRICS, "reward.acc"), 1.0)
    numbers = [name for name, one in SHOWN.items() if name not in ("pass_at", "best_of", "components")]
    view["evaluations"] = {"aime": [{"components": {"reward.acc": 1.0}, **dict.fromkeys(numbers, 1.0)}]}
    view["progress"] = {"reward": 1.0, "accuracy": 1.0, "tokens_per_s": 1.0, **shares}
    view["incidents"] = [{"cause": "process_died", "scope": "vertex"}]
    since = {"outcomes": {"scored": 2}, "turns": 3, "drawn_again": 0}
    lengths = {"groups": 1, "trained": {"sessions": 1, "tokens": 2.0, "seconds": 3.0}, "drawn": {}}
    sessions = {"waiting": 1, "branches": {"template": 1}, "since_start": since, "oversampled": lengths}
    door = {"health": {"door": {"key_bytes": {"lab": 4096}}, "sessions": sessions}}
    gpu = {"GPU-a": {"busy": 0.5, "memory_used_bytes": 1.0, "memory_bytes": 2.0}}
    view["vertices"] = [
        {**view["vertices"][0], "fields": {"gpus": gpu}},
        {**view["vertices"][0], "role": "rollout_manager", "fields": door},
    ]
    view["training"]["tokens"], view["job"]["priced_at"] = 1, 1.0
    text = prometheus_text(view, now=0.0).decode()
    exported = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    rows = table_under(OPERATIONS, "## Metrics")
    of_steps = {f"gyre_step_{name}" for name in METRICS}  # docs/training.md has these, and those below
    of_steps |= {f"gyre_heldout_{name}" for name in numbers}
    assert of_steps <= exported
    exported -= of_steps
    assert {name for name in rows if name.startswith("gyre_")} == exported | {
        "gyre_step_<metric>",
        "gyre_heldout_<number>",
    }
    for name in exported:
        kind = re.search(rf"^# TYPE {name} (\w+)", text, re.MULTILINE)
        assert kind is not None
        assert rows[name][1] == kind[1], name
        sample = re.search(rf"^{name}\{{([^}}]*)\}}", text, re.MULTILINE)
        assert sample is not None
        labels = set(re.findall(r"(\w+)=\"", sample[1]))
        assert set(re.findall(r"`(\w+)`", rows[name][2])) == labels, name


def test_every_number_of_an_evaluation_is_in_its_table() -> None:
    from gyre.failover.evaluation import SHOWN

    rows = table_under(ROOT / "docs" / "training.md", "## Evaluations")
    assert set(SHOWN) <= set(rows)


def test_every_rest_path_is_in_its_table_and_no_other() -> None:
    with StandingJob() as job:
        paths = create_app(job.master, token=None).openapi()["paths"]
    offered = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    section = OPERATIONS.read_text().split("## REST")[1].split("\n## ")[0]
    told = set(re.findall(r"^\| (GET|POST|DELETE) \| `([^`]+)` \|", section, re.MULTILINE))
    assert told == offered


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = {
        kind.exit_code
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if hasattr(kind, "exit_code")
    }
    section = OPERATIONS.read_text().split("| exit code | means |")[1].split("\n\n")[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert told == codes | {0, INTERRUPTED, TERMINATED}


def test_every_cause_and_scope_is_explained() -> None:
    assert {
        name for name in table_under(OPERATIONS, "## Incidents") if "_" in name or name in set(Cause)
    } == {cause.value for cause in Cause}
    concepts = ROOT / "docs" / "concepts.md"
    assert set(table_under(concepts, "## Failover")) >= {scope.value for scope in Scope}
    assert set(table_under(concepts, "## The graph")) >= {kind.value for kind in EdgeKind}
    life = concepts.read_text().split("## Life of a job")[1]
    assert all(phase.value in life for phase in JobPhase)
    assert all(recipe in (ROOT / "README.md").read_text() for recipe in RECIPES)


def test_every_reason_why_a_job_fails_is_listed() -> None:
    said = OPERATIONS.read_text().split("A job that ended as `failed`")[1].split("## Going on")[0]
    written = "".join(file.read_text() for file in (ROOT / "gyre/failover/handlers").glob("*.py"))
    ends = set(re.findall(r"JobPhase\.FAILED,\s+reason=Reason\.(\w+)", written))
    ends |= {one.ends_by.name for one in CAUSES.values() if one.ends_by is not None}
    ends |= {Reason.USER_CODE.name, Reason.BUDGET_SPENT.name}
    assert len(ends) > 5
    assert {Reason[name].value for name in ends} <= set(re.findall(r"`(\w+)`", said))


def test_every_event_command_and_table_is_in_the_journal_page() -> None:
    def kinds(module: Any, base: type) -> set[str]:
        return {
            name
            for name, kind in vars(module).items()
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and issubclass(kind, base)
        }

    assert set(table_under(JOURNAL, "## Events")) == kinds(events, events.Event)
    assert set(table_under(JOURNAL, "## Commands")) >= kinds(commands, commands.Command)
    assert set(table_under(JOURNAL, "## Schema")) == {*metadata.tables, VERSION_TABLE}


def test_invariants_are_named_as_the_code_names_them() -> None:
    section = JOURNAL.read_text().split("## Invariants")[1].split("## Schema")[0]
    docstrings = "\n".join(
        path.read_text()
        for room in ("failover", "master", "observe", "store", "rollouts")
        for path in (ROOT / "gyre" / room).rglob("*.py")
    )
    named = re.findall(r"^\| \*?([A-Za-z][\w -]+?)\*? \|", section, re.MULTILINE)
    assert len(named) > 15
    for name in named:
        if name not in ("name",):
            assert name in docstrings, name


def test_every_room_has_its_row_and_its_layer() -> None:
    rooms = {f"gyre/{path.parent.name}/" for path in (ROOT / "gyre").glob("*/__init__.py")}
    rooms |= {f"gyre/{path.name}" for path in (ROOT / "gyre").glob("*.py")} - {"gyre/__init__.py"}
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Rooms and layers")[1].split("\n## ")[0]
    assert rooms == set(re.findall(r"^\| \d+ \| `([^`]+)` \|", section, re.MULTILINE))


def folders_of(root: Path) -> set[str]:
    """Those with a file, as `gyre/api/`: two levels below the root, and deeper ones with more than one module."""
    found = set()
    for folder in (path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__"):
        depth = len(folder.relative_to(root).parts)
        modules = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if any(path.is_file() for path in folder.iterdir()) and (depth <= 2 or modules > 1):
            found.add(f"{folder.relative_to(root.parent)}/")
    return found


def test_every_folder_is_in_the_map_and_no_other() -> None:
    rows = table_under(ROOT / "docs" / "architecture.md", "## The folders")
    assert rows.keys() == folders_of(ROOT / "gyre")


def test_a_new_folder_would_be_missed(tmp_path: Path) -> None:
    for name in (
        "a/one.py",
        "a/b/__init__.py",
        "a/b/c/one.py",
        "a/b/d/one.py",
        "a/b/d/two.py",
        "a/__pycache__/x",
    ):
        (tmp_path / "gyre" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "gyre" / name).touch()
    assert folders_of(tmp_path / "gyre") == {"gyre/a/", "gyre/a/b/", "gyre/a/b/d/"}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/where.md"])
def test_names_that_are_said_to_be_in_a_file_are_there(page: str) -> None:
    text = " ".join(prose_of(ROOT / page).split())
    told = re.findall(r"((?:`\w+`(?:, | and | or )?)+) in `((?:gyre|tests)/[\w/]+\.py)`", text)
    assert len(told) > 20
    for names, path in told:
        content = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            made = rf"^ *(?:async def |def |class )?{name}\b"
            assert re.search(made, content, re.MULTILINE), f"{page}: {name} is not made in {path}"


def test_the_measured_table_can_be_filled_in() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    block = text.split("<!-- failover:begin -->")[1].split("<!-- failover:end -->")[0]
    assert "| what dies | detected | back at work |" in block
