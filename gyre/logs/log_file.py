"""A process's log file: what is written finds room or is dropped, and the file does not grow for ever.

    actor-0.1.log      the part that is written now
    actor-0.1.log.3    the two parts before it
    actor-0.1.log.4

A part keeps its number for ever; the one that is written now is the next number.

Invariants:
- *a print ends nothing*: bytes that a file does not take (a full disk) are dropped, and counted; how many is written
  when it takes some again. Nothing that prints ever sees an OSError;
- *bounded*: beside `PART_BYTES` there are at most `OLDER_PARTS` parts, by whomever the file is written;
- *nobody writes to nowhere*: the oldest part is emptied and becomes the next one, so that each process that got the
  descriptor (a library in C, a child) holds a file that is one of the parts, and its lines are found.

This module must not know what a line is, nor who reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

from gyre.logs.line_format import Stamps

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

PART_BYTES = 16 << 20
"""Some hundred thousand lines, the steps of weeks; with the older parts a process's log is read whole in a second."""

OLDER_PARTS = 2
"""With the one that is written now there are three, of which one may be half of a look back that matters."""

LOOK_BYTES = 256 << 10
"""Between two looks at the file's size, of what this process writes itself."""


class LogFile:
    """A descriptor that is written to under a lock, and whose writes never fail. With `path` this process is its owner,
    which begins the next part where one is full; it writes to `descriptors` too."""

    def __init__(
        self, descriptor: int, path: Path | None = None, *, part_bytes: int = PART_BYTES, stamped: bool = True
    ) -> None:
        self.lock = threading.RLock()
        self.stamps = Stamps()
        self._descriptor = descriptor
        self._path = path
        self._owner = os.getpid()
        self._part_bytes = part_bytes
        self._stamped = stamped
        self._since_look = 0
        self._dropped_bytes = 0
        self._why_dropped = ""
        self._open_by: object = None
        self._older: list[tuple[int, Path]] | None = None
        """The parts before this one, as far as they are known: only this process begins them."""

    def write(self, data: bytes) -> None:
        """Whole lines."""
        with self.lock:
            if self._open_by is not None:
                data = b"\n" + data
                self._open_by = None
            self._put(data)

    def write_open(self, data: bytes, by: object) -> None:
        """The beginning of a line, which `by` goes on with as long as nobody else writes."""
        with self.lock:
            self.write(data)
            self._open_by = by

    def go_on(self, data: bytes, by: object, *, ends: bool) -> bool:
        """More of the line that `by` has begun, if it is still open. Returns whether it was."""
        with self.lock:
            if self._open_by is not by:
                return False
            self._put(data)
            if ends:
                self._open_by = None
            return True

    def look(self) -> None:
        """Begin the next part if this one is full, or if somebody fills an older one. Of a process that does not own
        the file: does nothing."""
        with self.lock:
            self._since_look = 0
            if self._path is None or os.getpid() != self._owner:
                return
            older, self._older = self._older, None
            with contextlib.suppress(OSError):  # it goes on in the part that it has
                if older is None:
                    older = older_parts(self._path)
                full = os.fstat(self._descriptor).st_size >= self._part_bytes
                if full or any(part.stat().st_size >= 2 * self._part_bytes for _, part in older):
                    self._begin_part(self._path, older)
                else:
                    self._older = older

    def after_fork(self) -> None:
        """In a child: it may write, and begins no parts. Another thread may have had the lock."""
        self.lock = threading.RLock()
        self._open_by = None

    def _begin_part(self, path: Path, older: list[tuple[int, Path]]) -> None:
        if not _is_same(path, self._descriptor):
            return  # somebody removed it, or moved it away
        again: Path | None = None
        for _, part in older[: max(len(older) - OLDER_PARTS + 1, 0)]:
            if again is not None:
                again.unlink()
            again = part
        if again is not None:
            os.truncate(again, 0)
        now = path.with_name(f"{path.name}.{older[-1][0] + 1 if older else 1}")
        path.rename(now)
        try:
            if again is not None:
                again.rename(path)
            descriptor = _open(path)
        except OSError:
            now.rename(path)
            raise
        for number in {1, 2, self._descriptor}:
            if number == self._descriptor or _is_same(now, number):
                os.dup2(descriptor, number)
        os.close(descriptor)

    def _put(self, data: bytes) -> None:
        if not self._dropped_bytes:
            self._dropped_bytes = len(data) - self._write_all(data)
        else:
            self._put_after_note(data)
        self._since_look += len(data)
        if self._since_look >= LOOK_BYTES:
            self.look()

    def _put_after_note(self, data: bytes) -> None:
        note = f"[{self._dropped_bytes} bytes were not written: {self._why_dropped}]\n".encode()
        note = b"\n%b W %b" % (self.stamps.of(time.time()), note) if self._stamped else b"\n" + note
        if self._write_all(note) < len(note):
            self._dropped_bytes += len(data)
        else:
            self._dropped_bytes = len(data) - self._write_all(data)

    def _write_all(self, data: bytes) -> int:
        """Returns how much of it was written."""
        written = 0
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            full = error.errno in NO_SPACE
            self._why_dropped = "the disk had no room" if full else os.strerror(error.errno or errno.EIO)
        return written


def open_log(path: Path) -> int:
    """A descriptor that appends to the file, which is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _open(path)


def older_parts(path: Path) -> list[tuple[int, Path]]:
    """The parts before the one at `path`, with their numbers, the oldest first."""
    prefix = f"{path.name}."
    found = []
    with os.scandir(path.parent) as entries:
        for entry in entries:
            number = entry.name.removeprefix(prefix)
            if number != entry.name and number.isascii() and number.isdigit():
                found.append((int(number), Path(entry.path)))
    return sorted(found)


def is_part_of(path: Path, descriptor: int) -> bool:
    """Whether the descriptor is of the log at `path`: of any of its parts."""
    try:
        return any(_is_same(part, descriptor) for part in (path, *(part for _, part in older_parts(path))))
    except OSError:
        return False


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        there, here = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
