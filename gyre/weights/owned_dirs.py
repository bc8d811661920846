"""Folders of weights on a machine, each of one living process.

A folder is locked while its owner lives; the kernel lets go of the lock however the owner dies. Who comes next for the
same purpose takes the folder over, with what is in it; folders of other purposes that nobody holds are removed. Where
it is known that nobody will come, `remove_left` does not wait for the next one.

Invariants:
- *nothing outlives its purpose for long*;
- *a folder that somebody holds stays*: who removes one has its lock meanwhile.

This module must not know what is in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path

PREFIX = "gyre-weights-"

DRIVER_VARIABLE = "GYRE_DRIVER"
DRIVER_FILE = ".driver"
"""As `gyre.api.local_ray.sweeper` has them: it removes what is left by a cluster whose driver was killed."""


def default_root() -> Path:
    """Memory-backed where the system has such a folder."""
    shared = Path("/dev/shm")
    usable = sys.platform == "linux" and shared.is_dir() and os.access(shared, os.W_OK)
    return shared if usable else Path(tempfile.gettempdir())


class OwnedDir:
    """The folder `path`, below `root`. `purpose` is a text that only processes of the same work know; it is not shown.
    Removed by `close`, or left for a successor."""

    def __init__(self, root: Path, purpose: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        key = _key(purpose)
        found = _take_over(root, key)
        if found is None:
            # Locked before it is there under its name, so that nobody takes it in between.
            partial = root / f".{PREFIX}{key}-{uuid.uuid4().hex[:12]}"
            partial.mkdir(mode=0o700)
            lock = _try_lock(partial)
            path = root / partial.name[1:]
            partial.rename(path)
            found = path, lock
        self.path, self._lock = found
        _note_driver(self.path)

    def unlink(self) -> None:
        """Remove the folder beside whoever is at work in it: the process is about to be ended. The lock stays."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self, *, keep: bool = False) -> None:
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left(root: Path, purposes: Iterable[str]) -> list[Path]:
    """Remove folders of these purposes whose owners have died, and say which. Those of the living stay."""
    removed = []
    for purpose in purposes:
        for folder in sorted(root.glob(f"{PREFIX}{_key(purpose)}-*")):
            lock = _try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                removed.append(folder)
    return removed


def _note_driver(folder: Path) -> None:
    """Write down whose cluster the folder's owner belongs to, so that it is removed with the cluster. A cluster that
    ends with no driver has no mark."""
    note = folder / DRIVER_FILE
    driver = os.environ.get(DRIVER_VARIABLE, "")
    if driver:
        note.write_text(driver)
    else:
        note.unlink(missing_ok=True)


def _key(purpose: str) -> str:
    return hashlib.sha256(purpose.encode()).hexdigest()[:16]


def _take_over(root: Path, key: str) -> tuple[Path, int | None] | None:
    """A folder of this key that nobody holds, locked; other folders that nobody holds are removed."""
    mine: tuple[Path, int | None] | None = None
    for folder in sorted(root.glob(f"{PREFIX}*")):
        lock = _try_lock(folder)
        if lock is None:
            continue
        if mine is None and folder.name.startswith(f"{PREFIX}{key}-") and folder.is_dir():
            mine = folder, lock
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    return mine


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where somebody else holds it, or it is gone, a link, or another
    user's or open to others: such a folder may have been put there for us to fill or to delete."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            os.close(descriptor)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        if folder.exists():  # another may have removed it, and then let go
            return descriptor
        os.close(descriptor)
    return None
