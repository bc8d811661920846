"""What a process prints, line by line into its log, each with its time and its level.

`print` and whatever writes to `sys.stdout` is I, what goes to `sys.stderr` is W; a line that names its level in
capitals has that; a record of `logging` has its own, whatever handler and format it came by, if that writes to one of
the two. What writes to the descriptors 1 and 2 itself gets into the same file as it is.

Invariants:
- *a print ends nothing*: see `gyre.logs.log_file`;
- *a line is whole*: what is printed by one call stands together, whoever else prints;
- *a flush shows*: what was printed without an end of line is in the file once it is flushed;
- *a bar is a line*: of what writes over itself (`\\r`) the last state counts. While it moves, a state every `BAR_S` is
  written.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.logs.line_format import BETWEEN, ENGINE, Levels, level_of_record
from gyre.logs.log_file import NO_SPACE, PART_BYTES, LogFile, is_part_of, open_log

LOG_VARIABLE = "GYRE_LOG_FILE"
"""Names the log of the process that set it, for those that it starts with the same descriptors."""

LINE_BYTES = 64 << 10
"""A longer line goes on in another one."""

BAR_S = 10.0

_replaced: list[Any] = []
"""The streams of before: one that is forgotten closes its descriptor."""

_EMIT = logging.StreamHandler.emit.__code__


class _Begun:
    """A line that is not at its end."""

    __slots__ = ("bar", "bar_at", "levels", "shown", "text")

    def __init__(self, otherwise: str) -> None:
        self.text = b""
        """What is not yet in the file."""
        self.shown = False
        """Whether the file has the line's beginning."""
        self.levels = Levels(otherwise)
        self.bar = b""
        """The last state that was written of what writes over itself."""
        self.bar_at = 0.0


class LineWriter:
    """Bytes as they come, into whole lines of a log."""

    def __init__(
        self, file: LogFile, otherwise: str, *, mark: bytes = b"", clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._mark = mark
        self._clock = clock
        self._otherwise = otherwise
        self._begun = _Begun(otherwise)

    def write(self, data: bytes, level: str = "") -> None:
        """`level` is that of all its lines; else each is looked at."""
        with self._file.lock:
            begun = self._begun
            if data.find(b"\n") == len(data) - 1 < LINE_BYTES and not (
                begun.text or begun.shown or begun.bar or b"\r" in data
            ):  # one whole line, as nearly all are
                between = BETWEEN[level or begun.levels.of(data)]
                self._file.write(self._file.stamps.of(self._clock()) + between + self._mark + data)
                return
            if begun.text:
                data = begun.text + data
            if b"\n" in data:
                lines = data.split(b"\n")
                begun.text = lines.pop()
                self._write_lines(begun, lines, level)
            else:
                begun.text = data
            if len(begun.text) > LINE_BYTES:
                self._cut(begun, level)

    def flush(self) -> None:
        """Show what has no end of line yet."""
        if not self._begun.text:
            return
        with self._file.lock:
            begun = self._begun
            if b"\r" in begun.text:
                self._show_bar(begun)
            elif begun.text:
                self._show(begun)

    def drain(self) -> None:
        """End the line that is begun, at the end of the process."""
        with self._file.lock:
            begun = self._begun
            if begun.text or begun.shown:
                lines, begun.text = [begun.text], b""
                self._write_lines(begun, lines, "")

    def after_fork(self) -> None:
        """In a child: what was begun is the parent's."""
        self._begun = _Begun(self._otherwise)

    def _write_lines(self, begun: _Begun, lines: list[bytes], level: str) -> None:
        if begun.shown:
            begun.shown = False
            ends_there = b"\r" not in lines[0] and self._file.go_on(lines[0] + b"\n", begun, ends=True)
            if ends_there or not lines[0]:
                del lines[0]
        elif begun.bar:
            bar, begun.bar = begun.bar, b""
            if _last_state(lines[0]) == bar:
                del lines[0]
        stamp = self._file.stamps.of(self._clock())
        out: list[bytes] = []
        for line in lines:
            letter = level
            if b"\r" in line:
                line = line.rstrip(b"\r")
                if b"\r" in line:
                    line, letter = _last_state(line), level or "I"
            prefix = stamp + BETWEEN[letter or begun.levels.of(line)] + self._mark
            if len(line) <= LINE_BYTES:
                out += (prefix, line, b"\n")
                continue
            for at in range(0, len(line), LINE_BYTES):
                out += (prefix, line[at : at + LINE_BYTES], b"\n")
        if out:
            self._file.write(b"".join(out))

    def _cut(self, begun: _Begun, level: str) -> None:
        """Write a line that is too long to be kept here."""
        begun.text = _last_state(begun.text)
        if len(begun.text) > LINE_BYTES:
            lines, begun.text = [begun.text], b""
            self._write_lines(begun, lines, level)

    def _show(self, begun: _Begun) -> None:
        if not begun.shown or not self._file.go_on(begun.text, begun, ends=False):
            prefix = self._file.stamps.of(self._clock()) + BETWEEN[begun.levels.of(begun.text)] + self._mark
            self._file.write_open(prefix + begun.text, begun)
        begun.text, begun.shown = b"", True

    def _show_bar(self, begun: _Begun) -> None:
        state, now = _last_state(begun.text), self._clock()
        begun.text = b"\r" + state
        if state.strip() and state != begun.bar and not 0 <= now - begun.bar_at < BAR_S:
            begun.bar, begun.bar_at = state, now
            self._file.write(self._file.stamps.of(now) + BETWEEN["I"] + self._mark + state + b"\n")


class LogBytes(io.BufferedIOBase):
    """Below `sys.stdout` or `sys.stderr` of a process with a log: what gets whole lines from `io.TextIOWrapper`."""

    def __init__(self, lines: LineWriter, descriptor: int) -> None:
        super().__init__()
        self._lines = lines
        self._descriptor = descriptor
        self.name = "<stdout>" if descriptor == 1 else "<stderr>"
        self.mode = "wb"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        caller = (
            sys._getframe().f_back
        )  # None where the interpreter itself writes, of an exception that nobody took
        if caller is not None and caller.f_code is _EMIT:  # a record of `logging`, whatever its format
            self._lines.write(data, level_of_record(caller.f_locals["record"].levelno))
        else:
            self._lines.write(data)
        return len(data)

    def flush(self) -> None:
        self._lines.flush()


class LossyFile(io.RawIOBase):
    """A file descriptor whose writes never fail for want of room, without lines: of a process that has no log."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._file = _known(LogFile(descriptor, stamped=False))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._file.write(bytes(view))
        return len(view)


_files: list[LogFile] = []
_writers: list[LineWriter] = []
_log: LogFile | None = None
"""This process's own."""


def redirect_output(path: Path, *, part_bytes: int = PART_BYTES) -> None:
    """Send this process's stdout and stderr to its own log file, so that `gyre logs` finds it by vertex. Where the disk
    has no room for the file, what is printed goes where it went before."""
    if not path.name:
        return
    try:
        descriptor = open_log(path)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        keep_printing()
        return
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # into a file that has no room, or is closed
        sys.stdout.flush()
        sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ[LOG_VARIABLE] = str(path.absolute())
    _print_lines(LogFile(1, path.absolute(), part_bytes=part_bytes))


def keep_printing() -> None:
    """From now on what this process prints is dropped where its file has no room. If that is the log of the process
    that started it, its lines have time and level as that one's have."""
    path = os.environ.get(LOG_VARIABLE, "")
    if path and all(is_part_of(Path(path), descriptor) for descriptor in (1, 2)):
        _print_lines(LogFile(2))
        return
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        _replace(name, _text(io.BufferedWriter(LossyFile(descriptor))))


def look_at_log() -> None:
    """Keep this process's log small, where others write to it too. A look is three system calls."""
    if _log is not None:
        _log.look()


def engine_lines() -> LineWriter | None:
    """What takes the output of this process's engine into its log; None if it has none."""
    return LineWriter(_log, "I", mark=ENGINE) if _log is not None else None


def _print_lines(file: LogFile) -> None:
    global _log
    if _log is None:
        atexit.register(_drain)
    _log = _known(file)
    _writers.clear()
    for name, descriptor, level in (("stdout", 1, "I"), ("stderr", 2, "W")):
        lines = LineWriter(file, level)
        _writers.append(lines)
        _replace(name, _text(LogBytes(lines, descriptor)))


def _text(stream: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _replace(name: str, stream: Any) -> None:
    old = getattr(sys, name)
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # what was printed before is lost, or closed
        old.flush()
    _replaced.append(old)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {one for logger in loggers for one in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and old is not None and handler.stream is old:
            handler.stream = stream


def _drain() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or another one
            stream.flush()
    for lines in _writers:
        lines.drain()


def _known(file: LogFile) -> LogFile:
    """The file, whose lock a child that is forked gets anew: another thread may have it in the moment of the fork."""
    if not _files:
        os.register_at_fork(after_in_child=_after_fork)
    _files.append(file)
    return file


def _after_fork() -> None:
    for file in _files:
        file.after_fork()
    for lines in _writers:
        lines.after_fork()


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
