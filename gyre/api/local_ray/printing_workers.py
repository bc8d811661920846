"""Ray workers that a full disk does not cripple.

Ray itself prints into a worker's log before it creates an actor. Where the disk has no room that raises in Ray's own
code: the worker stands there for ever, and Ray neither ends it nor starts another. A worker that runs Gyre's hook drops
what has no room, and goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import gyre

HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Ray's own name: what it holds, `module.function`, every worker calls when it begins."""

KEEP_PRINTING = "gyre.logs.output.keep_printing"


@contextlib.contextmanager
def printing_workers() -> Iterator[None]:
    """A block in which a cluster is started whose workers have the hook: they inherit the environment."""
    home = str(Path(gyre.__file__).parents[1])
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with _set({HOOK: KEEP_PRINTING, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}):
        yield


@contextlib.contextmanager
def _set(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
