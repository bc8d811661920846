"""Where one agent keeps the weights that it fetched, in a folder shared by the agents of a machine.

Invariant *nothing outlives its agent for long*: a folder is locked while its agent lives; the kernel lets go of the
lock however the agent dies, and the next agent on the machine removes what is not locked.

This module must not know what is in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

PREFIX = "gyre-weights-"


def default_root() -> Path:
    """Memory-backed where the system has such a folder."""
    shared = Path("/dev/shm")
    usable = sys.platform == "linux" and shared.is_dir() and os.access(shared, os.W_OK)
    return shared if usable else Path(tempfile.gettempdir())


class WeightCache:
    """The folder `path`, below `root`; `name` is the agent's own. Removed by `close`."""

    def __init__(self, root: Path, name: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        self.path = root / f"{PREFIX}{name}"
        # Locked before it is there under its name, so that nobody sweeps it in between.
        partial = root / f".{PREFIX}{name}"
        partial.mkdir()
        self._lock = _try_lock(partial)
        partial.rename(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(root: Path) -> None:
    """Remove the folders of agents that are gone. Others may sweep at the same time."""
    for folder in root.glob(f"{PREFIX}*"):
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where somebody else holds it, or it is gone or not ours."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None
