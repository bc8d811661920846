"""A job from a file: YAML with the keys of `JobSpec`, or Python that builds one.

A Python file defines `job`: an `RLJob`, an `RLJobBuilder`, or a function that returns one. Relative paths in a YAML
file (`python_path`, `config`, an entrypoint's file) count from the file's folder, so that a job means the same
wherever it is submitted from; `~/` is the user's home. A mistake names the file, and the line of its key. This module
must not start anything.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.api.definition.builder import RLJobBuilder, RoleBuilder
from gyre.api.definition.entrypoints import import_roots, load_file
from gyre.api.definition.rl_job import RLJob
from gyre.api.definition.source import LOCATED, PLACE, JobSource, YamlPart
from gyre.config import Entrypoint, JobSpec, apply_overrides, parse_job
from gyre.config.parse import with_home
from gyre.config.yaml_text import load_yaml_text
from gyre.errors import ConfigError, GyreError, nearest
from gyre.users_code import is_users, words_of

_YAML = (".yaml", ".yml", ".json")


def load_job_file(path: str | Path, overrides: Iterable[str] = ()) -> RLJob:
    """The job in a file, with `a.b=c` overrides laid over its spec. Raises ConfigError naming the file."""
    file, overrides = Path(path).expanduser(), tuple(overrides)
    if file.is_dir():
        raise ConfigError(f"{file}: is a folder, expected a job file.")
    if not file.is_file():
        siblings = [other.name for other in file.parent.glob("*") if other.suffix in (".py", *_YAML)]
        near = nearest(file.name, siblings)
        looked = "" if file.is_absolute() else f", looked up in {Path.cwd()}"
        raise ConfigError(f"{file}: no such file{looked}" + (f"; {near}" if near.startswith("did") else "."))
    if file.suffix == ".py":
        spec, source = _from_python(file)
        data = spec.model_dump(mode="json")
    elif file.suffix in _YAML:
        data, source = _from_yaml(file)
    else:
        raise ConfigError(
            f"{file}: ends in {file.suffix or 'nothing'!r}, expected .yaml, .yml, .json or .py."
        )
    source = replace(source, file=str(file), overrides=overrides)
    with source.named(always=True):
        data = apply_overrides(data, overrides)
        data |= {key: with_home(data[key]) for key in _WITH_PATHS if key in data}
        spec = parse_job(data)
    folder = str(file.resolve().parent)
    given = [role.entrypoint for role in spec.roles.values() if role.entrypoint is not None]
    for root in (folder, *_roots(given, folder)):
        if root not in spec.python_path:
            spec.python_path.append(root)
    return RLJob(spec, source)


_WITH_PATHS = ("config", "python_path", "roles", "rollouts")
"""The parts of a job with texts that name files."""


def _roots(entrypoints: list[Entrypoint], folder: str) -> list[str]:
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        return import_roots(entrypoints)
    finally:
        sys.path[:] = before


# -- YAML -------------------------------------------------------------------------------------------


def _from_yaml(file: Path) -> tuple[dict[str, Any], JobSource]:
    text = load_yaml_text(file)
    data, parts = dict(text.data), [YamlPart(str(file), text)]
    folder = file.resolve().parent
    if isinstance(data.get("config"), str):
        own = folder / Path(data["config"]).expanduser()
        text = load_yaml_text(own)
        data["config"] = text.data
        parts.append(YamlPart(str(own), text, ("config",)))
    if isinstance(data.get("python_path"), str):
        data["python_path"] = [data["python_path"]]
    if isinstance(data.get("python_path"), list):
        data["python_path"] = [
            str((folder / Path(entry).expanduser()).resolve()) if isinstance(entry, str) else entry
            for entry in data["python_path"]
        ]
    roles = data.get("roles")
    if isinstance(roles, dict):
        # `actor:` with nothing below it is the role with every default.
        data["roles"] = {name: _role(value, folder) for name, value in roles.items()}
    return data, JobSource(str(file), tuple(parts))


def _role(value: Any, folder: Path) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        return value
    entrypoint = value.get("entrypoint")
    if isinstance(entrypoint, str) and ".py:" in entrypoint:
        return {**value, "entrypoint": str(folder / Path(entrypoint).expanduser())}
    if isinstance(entrypoint, dict) and isinstance(entrypoint.get("file"), str):
        own = str(folder / Path(entrypoint["file"]).expanduser())
        return {**value, "entrypoint": {**entrypoint, "file": own}}
    return value


# -- Python -----------------------------------------------------------------------------------------


def _from_python(file: Path) -> tuple[JobSpec, JobSource]:
    folder = str(file.resolve().parent)
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        module = load_file(file)
        found = getattr(module, "job", None)
        if callable(found) and not isinstance(found, RLJob | RLJobBuilder | RoleBuilder):
            found = found()
        if isinstance(found, RLJobBuilder | RoleBuilder):
            found = found.build()
    except (Exception, SystemExit) as error:
        raise _at_line(file, error) from error
    finally:
        sys.path[:] = before
    if isinstance(found, RLJob):
        return found.spec, found.source or JobSource(str(file))
    if isinstance(found, JobSpec):
        return found, JobSource(str(file))
    if found is None:
        jobs = [
            key
            for key, value in vars(module).items()
            if isinstance(value, RLJob | RLJobBuilder | RoleBuilder)
        ]
        where = f"{file}, line {_line_of_name(file, jobs[0])}" if jobs else str(file)
        raise ConfigError(
            f"{where}: defines no job" + (f", but {', '.join(jobs)}." if jobs else "."),
            hint="Name it `job`: an RLJob, an RLJobBuilder, or a function that returns one.",
        )
    kind = "a mapping" if isinstance(found, Mapping) else f"of type {type(found).__name__}"
    raise ConfigError(
        f"{file}: `job` is {kind}, expected an RLJob, an RLJobBuilder, or a function that returns one."
    )


def _line_of_name(file: Path, name: str) -> int:
    """The line in which a file gives this name a value at its top level."""
    for node in ast.parse(file.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.lineno
    return 1


def _at_line(file: Path, error: BaseException) -> ConfigError:
    """An error of the user's file, with the line that it is about: where the key was given, or else the last line of
    that file that led to it. Of an error that is not Gyre's the details have the `frames` of the user's own code."""
    at = str(file.resolve())
    line: int | None = None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    place = error.details.pop(PLACE, None) if isinstance(error, GyreError) else None
    if place is not None and place[0] == at:
        line = place[1]
    elif isinstance(error, SyntaxError) and error.filename == at:
        line = error.lineno
    else:
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == at), None)
    where = f"{file}, line {line}" if line else str(file)
    details: dict[str, Any] = {"line": line, LOCATED: True}
    if isinstance(error, GyreError):
        return ConfigError(f"{where}: {error.message}", hint=error.hint, details={**error.details, **details})
    what = words_of(error)
    if isinstance(error, SyntaxError) and error.filename and error.filename != at:
        what = f"{error.filename}, line {error.lineno}: {what}"
    elif frames and frames[-1].filename != at:
        what = f"{frames[-1].filename}, line {frames[-1].lineno}: {what}"
    if len(frames) > 1:
        details["frames"] = [
            f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames
        ]
    return ConfigError(f"{where}: {what}" + ("" if what[-1] in ".?!" else "."), details=details)
