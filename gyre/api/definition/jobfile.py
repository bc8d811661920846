"""A job from a file: YAML with the keys of `JobSpec`, or Python that builds one.

A Python file defines `job`: an `RLJob`, an `RLJobBuilder`, or a function that returns one. Relative paths in a YAML
file (`python_path`, `config`, an entrypoint's file) count from the file's folder, so that a job means the same
wherever it is submitted from. This module must not start anything.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gyre.api.definition.builder import RLJobBuilder, RoleBuilder
from gyre.api.definition.entrypoints import import_roots, load_file
from gyre.api.definition.rl_job import RLJob
from gyre.config import Entrypoint, JobSpec, apply_overrides, load_yaml, parse_job
from gyre.errors import ConfigError, GyreError, nearest

_YAML = (".yaml", ".yml", ".json")


def load_job_file(path: str | Path, overrides: Iterable[str] = ()) -> RLJob:
    """The job in a file, with `a.b=c` overrides laid over its spec. Raises ConfigError naming the file."""
    file = Path(path)
    if not file.is_file():
        siblings = [other.name for other in file.parent.glob("*") if other.suffix in (".py", *_YAML)]
        near = nearest(file.name, siblings)
        raise ConfigError(f"{file}: no such file" + (f"; {near}" if near.startswith("did") else "."))
    if file.suffix == ".py":
        data = _from_python(file).model_dump(mode="json")
    elif file.suffix in _YAML:
        data = _from_yaml(file)
    else:
        raise ConfigError(
            f"{file}: ends in {file.suffix or 'nothing'!r}, expected .yaml, .yml, .json or .py."
        )
    try:
        spec = parse_job(apply_overrides(data, overrides))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint, details=error.details) from None
    folder = str(file.resolve().parent)
    given = [role.entrypoint for role in spec.roles.values() if role.entrypoint is not None]
    for root in (folder, *_roots(given, folder)):
        if root not in spec.python_path:
            spec.python_path.append(root)
    return RLJob(spec)


def _roots(entrypoints: list[Entrypoint], folder: str) -> list[str]:
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        return import_roots(entrypoints)
    finally:
        sys.path[:] = before


# -- YAML -------------------------------------------------------------------------------------------


def _from_yaml(file: Path) -> dict[str, Any]:
    data = load_yaml(file)
    folder = file.resolve().parent
    if isinstance(data.get("config"), str):
        data["config"] = load_yaml(folder / data["config"])
    if isinstance(data.get("python_path"), str):
        data["python_path"] = [data["python_path"]]
    if isinstance(data.get("python_path"), list):
        data["python_path"] = [
            str((folder / entry).resolve()) if isinstance(entry, str) else entry
            for entry in data["python_path"]
        ]
    roles = data.get("roles")
    if isinstance(roles, dict):
        # `actor:` with nothing below it is the role with every default.
        data["roles"] = {name: _role(value, folder) for name, value in roles.items()}
    return data


def _role(value: Any, folder: Path) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        return value
    entrypoint = value.get("entrypoint")
    if isinstance(entrypoint, str) and ".py:" in entrypoint:
        return {**value, "entrypoint": str(folder / entrypoint)}
    if isinstance(entrypoint, dict) and isinstance(entrypoint.get("file"), str):
        return {**value, "entrypoint": {**entrypoint, "file": str(folder / entrypoint["file"])}}
    return value


# -- Python -----------------------------------------------------------------------------------------


def _from_python(file: Path) -> JobSpec:
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
        return found.spec
    if isinstance(found, JobSpec):
        return found
    if found is None:
        jobs = [
            key
            for key, value in vars(module).items()
            if isinstance(value, RLJob | RLJobBuilder | RoleBuilder)
        ]
        raise ConfigError(
            f"{file}: defines no job" + (f", but {', '.join(jobs)}." if jobs else "."),
            hint="Name it `job`: an RLJob, an RLJobBuilder, or a function that returns one.",
        )
    kind = "a mapping" if isinstance(found, Mapping) else f"of type {type(found).__name__}"
    raise ConfigError(
        f"{file}: `job` is {kind}, expected an RLJob, an RLJobBuilder, or a function that returns one."
    )


def _at_line(file: Path, error: BaseException) -> ConfigError:
    """An error of the user's file, with the last line of that file that led to it."""
    line: int | None = None
    if isinstance(error, SyntaxError) and error.filename == str(file.resolve()):
        line = error.lineno
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(file.resolve()):
                line = frame.lineno
    where = f"{file}, line {line}" if line else str(file)
    details: dict[str, Any] = {"line": line, "traceback": "".join(traceback.format_exception(error))}
    if isinstance(error, GyreError):
        return ConfigError(f"{where}: {error.message}", hint=error.hint, details={**error.details, **details})
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    return ConfigError(f"{where}: {type(error).__name__}: {what}", details=details)
