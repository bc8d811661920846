"""What a process prints, into a log file that may have no room left.

Invariant *a print ends nothing*: bytes that a full disk does not take are dropped, and counted; how many is written
when there is room again. A user's `print` never raises for want of room.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_replaced: list[Any] = []
"""The streams of before: one that is forgotten closes its descriptor."""


class LossyFile(io.RawIOBase):
    """A file descriptor whose writes never fail for want of room."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._dropped_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        try:
            if self._dropped_bytes:
                note = f"\n[{self._dropped_bytes} bytes were not written: the disk had no room]\n"
                os.write(self._descriptor, note.encode())
                self._dropped_bytes = 0
            return os.write(self._descriptor, view)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._dropped_bytes += len(view)
            return len(view)


def keep_printing() -> None:
    """From now on what this process prints is dropped where its file has no room."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # what was printed before is lost, or closed
            _replaced.append(getattr(sys, name))
            _replaced[-1].flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(LossyFile(descriptor)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr to its own log file, so that `gyre logs` finds it by vertex. Where the disk
    has no room for the file, what is printed goes where it went before."""
    if not path.name:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
    else:
        with contextlib.suppress(OSError, ValueError):  # into a file that has no room
            sys.stdout.flush()
            sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    keep_printing()
