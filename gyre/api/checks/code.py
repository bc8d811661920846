"""The user's own code that a job names: whether it imports, is what it is to be, and can be called as Gyre calls it.

Importing runs code of the user's, so it is done in a process of its own with a deadline, unless this process has
loaded all of it already. A job of Gyre's own classes alone imports nothing.

Invariants:
- *nobody is hung or ended*: an import that does not return, or that ends its process, is a sentence;
- *nobody is left behind*: the process is guarded (`gyre.engines.guarded`), and gone with whatever it started when its
  answer is there, when its time is over, and when this process dies;
- *named*: the sentence has the key, the module, and file and line of the user's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.api.checks.findings import Note, elsewhere
from gyre.api.definition.entrypoints import FILE_MODULE, is_own
from gyre.config import Entrypoint, JobSpec, parse_job
from gyre.config.job_plugins import plugins_of
from gyre.config.plugins import BACKEND, RECIPE
from gyre.engines.guarded import Guarded
from gyre.errors import ConfigError, GraphError, GyreError

IMPORT_S = 60.0
"""Within which the user's modules must import. Torch alone takes 20 s on a busy machine."""

START_S = 120.0
"""Within which the process apart must have imported Gyre's own checks: two seconds, also on a busy machine."""

_POLL_S = 0.01
_ANSWER = "from gyre.api.checks.code import answer; answer()"

TRYING = "when it is constructed"
"""How `doing` ends while a class of prompts is tried, which may take long and be in order."""

_DEFINITIONS = "A module that is imported should define, and do nothing else."
_ERRORS = {kind.__name__: kind for kind in (ConfigError, GraphError)}


def users_names(spec: JobSpec) -> dict[str, Entrypoint | None]:
    """What a compiled job names that is not Gyre's, by the key that names it; None for an installed package's entry
    point."""
    found: dict[str, Entrypoint | None] = {
        f"roles.{role}.entrypoint": given.entrypoint
        for role, given in spec.roles.items()
        if given.entrypoint is not None and not is_own(role, given.entrypoint)
    }
    named = {kind.setting: name for kind, name in plugins_of(spec)}
    if spec.run.data is not None:
        named["run.data"] = spec.run.data
        _check_import_path("run.data", spec.run.data)
    if spec.staleness.function is not None:
        named["staleness.policy"] = spec.staleness.policy
    for key, name in named.items():
        if not (key == "run.data" and name.startswith("gyre.")):
            found[key] = Entrypoint.parse(name) if ":" in name else None
    return found


def _check_import_path(key: str, name: str) -> None:
    """Raises ConfigError for what is no `module:Class`."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py") or not attribute or not all(map(str.isidentifier, module.split("."))):
        raise ConfigError(
            f'{key}: {name!r} given, expected "module:Class".',
            hint="A job file's own folder is searched for the module, and those of python_path.",
        )


def check_graphs_code(spec: JobSpec) -> None:
    """See that a recipe and a back end of the user's own import, before the job is compiled: which imports them in this
    process. Raises ConfigError."""
    for kind, name in plugins_of(spec):
        if kind in (RECIPE, BACKEND) and ":" in name and name.partition(":")[0] not in sys.modules:
            _examined_apart(spec, graph_alone=True)
            return


def check_code(spec: JobSpec, *, here: bool, must_import: bool = False) -> Iterator[str]:
    """Yields notes and warnings on the user's own code. `spec` is a compiled job's. Raises ConfigError.

    A module that is missing on this machine is a mistake where the job runs `here`, or if it `must_import`; else it is
    a note.
    """
    from gyre.api.checks.examine import examine

    names = users_names(spec)
    if not names:
        return
    constructs = {"run.data", "config.task.name"} & names.keys()
    loaded = {key: _is_loaded(name) for key, name in names.items()}
    runs_now = any(map(_is_running, names.values()))  # imported again it would submit the job again
    try:
        if runs_now or (all(loaded.values()) and not constructs):
            found = examine(spec)
        else:
            found = _examined_apart(spec)
    except ConfigError as error:
        if here or must_import or "import_of" not in error.details:
            raise
        yield elsewhere(error.message)
        return
    yield from found


def _is_running(entrypoint: Entrypoint | None) -> bool:
    """Whether it is in the script that this process runs."""
    if entrypoint is None:
        return False
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if entrypoint.file is None or main is None:
        return entrypoint.module == "__main__" and entrypoint.file is None
    return Path(main).resolve() == Path(entrypoint.file).resolve()


def _is_loaded(entrypoint: Entrypoint | None) -> bool:
    """Whether this process has loaded the module, so that looking into it runs nothing that has not run."""
    if entrypoint is None:
        return False
    if entrypoint.file is None:
        return entrypoint.module in sys.modules
    file = Path(entrypoint.file).resolve()
    loaded = [
        module
        for name, module in list(sys.modules.items())
        if name == "__main__" or name.startswith(FILE_MODULE)
    ]
    return any(Path(getattr(module, "__file__", None) or "/").resolve() == file for module in loaded)


def _examined_apart(spec: JobSpec, *, graph_alone: bool = False) -> list[str]:
    """What `examine` finds, in a process of its own; with `graph_alone` its recipe and back end are imported and
    nothing else. Raises what it raises, and ConfigError if it does not return."""
    with tempfile.TemporaryDirectory(prefix="gyre-plan-") as folder:
        question = Path(folder) / "job.json"
        question.write_text(
            json.dumps({"spec": spec.model_dump(mode="json"), "path": sys.path, "graph_alone": graph_alone})
        )
        child = Guarded(
            [sys.executable, "-c", _ANSWER, folder],
            stdout=subprocess.DEVNULL,  # what a module prints while it is imported is no answer to `gyre plan`
            stderr=subprocess.DEVNULL,
            env={**os.environ, **spec.env},
        )
        try:
            in_time = _wait(child, Path(folder) / "doing")
        finally:
            code = child.end()
        if not in_time:
            doing = _doing(Path(folder))
            if doing.endswith(TRYING):
                return [
                    Note(f"{doing} takes longer than {IMPORT_S:g} s, so its prompts were not looked into.")
                ]
            raise ConfigError(f"{doing} did not import within {IMPORT_S:g} s.", hint=_DEFINITIONS)
        try:
            answered = json.loads((Path(folder) / "answer.json").read_text())
        except (OSError, ValueError):
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise ConfigError(
                f"{_doing(Path(folder))} ended its process {how} when it was imported.", hint=_DEFINITIONS
            ) from None
    if "error" in answered:
        told = answered["error"]
        raise _ERRORS.get(told["kind"], ConfigError)(
            told["message"], hint=told["hint"], details=told["details"]
        )
    return [Note(text) for text in answered["notes"]] + list(answered["warnings"])


def _wait(child: Guarded, doing: Path) -> bool:
    """Wait for its end, for `IMPORT_S` from when it looks into the first module. Returns whether it came."""
    until, looks = time.monotonic() + START_S, False
    while not child.wait(_POLL_S):
        now = time.monotonic()
        if not looks and doing.exists():
            until, looks = now + IMPORT_S, True
        if now > until:
            return False
    return True


def _doing(folder: Path) -> str:
    """What the process apart was looking into at last."""
    try:
        return (folder / "doing").read_text()
    except OSError:
        return "python_path: the user's code"


def answer() -> None:
    """In the process apart: look into the job of the folder that the command line names."""
    folder = Path(sys.argv[1])
    question: dict[str, Any] = json.loads((folder / "job.json").read_text())
    sys.path[:] = question["path"]
    from gyre.api.checks.examine import examine, import_graph

    def doing(text: str) -> None:
        (folder / "doing").write_text(text)

    told: dict[str, Any]
    try:
        spec = parse_job(question["spec"])
        found = import_graph(spec, doing) if question["graph_alone"] else examine(spec, doing)
        told = {
            "notes": [each for each in found if isinstance(each, Note)],
            "warnings": [each for each in found if not isinstance(each, Note)],
        }
    except GyreError as error:
        details = {key: value for key, value in error.details.items() if isinstance(value, str | int | list)}
        told = {
            "error": {
                "kind": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
                "details": details,
            }
        }
    partial = folder / "answer.partial"
    partial.write_text(json.dumps(told))
    os.replace(partial, folder / "answer.json")
    os._exit(0)  # threads that a module has begun are not waited for
