"""The user's entrypoint in a worker: a function, a class that is made without arguments, or a script.

What is marked with `@rpc` is exported as DLRover does: module-level functions of the entrypoint's module, and methods
of the class. A class's `run` is its main; one without `run` serves calls alone.

This module must not import Ray or torch.
"""

from __future__ import annotations

import importlib
import runpy
import shlex
import sys
from collections.abc import Callable
from typing import Any

from gyre.errors import ConfigError, UserCodeError, nearest
from gyre_dlrover.api.runtime.rpc_helper import export_rpc_instance
from gyre_dlrover.common.enums import WorkloadEntrypointType
from gyre_dlrover.common.workload_desc import AnyWorkloadDesc


class Entry:
    """Imported, made and exported. `main` is what there is to run; None where the worker only serves calls."""

    def __init__(self, workload: AnyWorkloadDesc) -> None:
        """Raises ConfigError where the entrypoint is not there, and what the user's module or class raises."""
        self.module = ""
        if workload.entry_point_type is WorkloadEntrypointType.PY_CMD:
            self.main: Callable[[], Any] | None = lambda: _run_script(workload.entry_point)
            return
        self.module, _, name = workload.entry_point.rpartition(".")
        found = _found(self.module, name, workload.entry_point)
        export_rpc_instance(None, sys.modules[self.module])
        if not isinstance(found, type):
            self.main = found
            return
        made = found()
        export_rpc_instance(None, made)
        self.main = getattr(made, "run", None)
        if self.main is None and workload.is_driver:
            raise ConfigError(
                f"{workload.entry_point} has no run(), and the job would wait for it for ever.",
                hint="Define run(), or say .not_driver() of the role.",
            )

    def run(self) -> Any:
        """What `main` returns. Raises what it raises; UserCodeError for a script that exits with another status than
        0."""
        assert self.main is not None
        try:
            return self.main()
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            raise UserCodeError(f"the entrypoint exited with {end.code!r}.") from end


def _found(module: str, name: str, entry_point: str) -> Any:
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"entry_point: {entry_point!r}: there is no module {error.name!r}.",
            hint="Workers import from the folder in which the job was submitted, or from DLROVER_WORKING_DIR.",
        ) from None
    if not callable(found := getattr(loaded, name, None)):
        known = [key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"entry_point: {module} has no function or class {name!r}; {nearest(name, known)}")
    return found


def _run_script(command: str) -> None:
    """Run a script in this process, with its arguments in `sys.argv`."""
    before = sys.argv
    sys.argv = shlex.split(command)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before
