"""The lines of a job's logs, of all files in the order of time.

Files are `<vertex>.<incarnation>.log`, with their older parts (`gyre.logs.log_file`). A place is the offset in each
part, by the name that the part has for ever: `actor-0.1.log.3`, also while it is still `actor-0.1.log`.

Invariants:
- *each line once*: whoever goes on from the place of the page before gets every line of the parts that are still there
  once, and those of one file in their order, also while the next part is begun;
- *bounded*: a page scans `SCAN_BYTES` at most, and says whether it could go on; a line is `LINE_BYTES` at most;
- *the folder's own files*: a link is no log, whatever it leads to;
- *by the files' clocks*: the times are those of the machines that wrote the lines. No clock is corrected here.

This module must not know jobs, vertices or ports: a folder is all it looks at.
"""

from __future__ import annotations

import heapq
import os
import stat
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from gyre.errors import ConfigError
from gyre.logs.line_format import LEVELS, PREFIX_BYTES, STAMP_BYTES, Stamps, is_stamped, level_in, time_of
from gyre.logs.pattern import Finds, matcher

PAGE_BYTES = 64 << 10
"""Of text in a page."""

SCAN_BYTES = 8 << 20
"""That are looked through for a page: a tenth of a second to a half."""

BLOCK_BYTES = 128 << 10
FIRST_BLOCK_BYTES = 16 << 10
"""Read from a file's end first: of most files a few lines are enough."""

LINE_BYTES = 256 << 10
"""A line that is longer is given in pieces. Gyre writes none that long."""

BATCH_BYTES = 1 << 20
"""Of lines in which an expression is looked for at a time."""

PARTIAL_S = 1.0
"""A line without an end is taken for one when nothing was added to it for so long: its process has died, or waits."""

_CLOCKS_S = 5.0
"""The clock of a file server may be that much behind those of the machines that write."""

_MOST_UNTIMED = 2000
"""Lines without a time that are kept until the line before them is found."""

_TRIES = 5
"""To find the files as they were listed: parts are begun seldom."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines are wanted. `level` and whatever is worse; `since` and `until` in seconds since 1970; `grep` is a
    regular expression, looked for in the text."""

    vertex: str | None = None
    role: str | None = None
    rank: int | None = None
    level: str | None = None
    since: float | None = None
    until: float | None = None
    grep: str | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in LEVELS:
            raise ConfigError(
                f"level: {self.level!r} is none.",
                hint="D, I, W and E are debug, information, warning and error.",
            )

    def wants(self, vertex: str) -> bool:
        role, _, rank = vertex.rpartition("-")
        return (
            self.vertex in (None, vertex)
            and self.role in (None, role)
            and (self.rank is None or rank == str(self.rank))
        )


@dataclass(frozen=True, slots=True)
class _Part:
    key: str
    """The name that it has for ever."""
    path: Path
    file: str
    vertex: str
    incarnation: int
    number: int
    inode: int
    size: int
    mtime: float


class _Line(NamedTuple):
    when: bytes
    """Its time as a stamp, which does not go back within a part."""
    vertex: str
    incarnation: int
    number: int
    end: int
    """Where the next one begins."""
    level: str
    text: bytes
    stamp: bytes
    part: _Part


_BY_TIME = attrgetter("when", "vertex", "incarnation", "number", "end")


class _Batch(NamedTuple):
    """Lines in order; those that may be wanted are `candidates`, by their place among them."""

    lines: list[_Line]
    candidates: list[int]


def read_page(
    folder: Path,
    query: LogQuery,
    *,
    after: Mapping[str, int] | None = None,
    tail: int | None = None,
    limit_bytes: int = PAGE_BYTES,
    now: float | None = None,
) -> dict[str, Any]:
    """A page of lines: `lines` (each `at`, `level`, `vertex`, `incarnation`, `file`, `text`) in the order of time,
    `next`, the place to go on from, `more`, whether there is more to read there at once, and `searched_from`, the time
    before which nothing was looked at though it may hold what is wanted (None: all was).

    With `after`, the `next` of a page before, what comes after it. Without: with `query.since` from there on, else the
    newest `limit_bytes` of text, or the newest `tail` lines of each vertex.

    Raises ConfigError for a level or an expression that is none, and for an expression that takes too long.
    """
    finds = matcher(query.grep) if query.grep else None
    now = time.time() if now is None else now
    page: dict[str, Any] = {}
    for _ in range(_TRIES):
        parts = list_parts(folder, query)
        if after or (query.since is not None and tail is None):
            page = _forward(parts, query, finds, dict(after) if after else None, limit_bytes, now)
        else:
            page = _backward(parts, query, finds, tail, limit_bytes, now)
        if _identities(parts) == _identities(list_parts(folder, query)):
            return page
        # A part was begun meanwhile: what was read may be of another one, and a folder that is listed while names in it
        # change may lack one.
    return {**page, "lines": [], "next": dict(after), "more": True} if after else page


def _identities(parts: list[_Part]) -> dict[str, int]:
    return {part.key: part.inode for part in parts}


def last_lines(folder: Path, vertex: str, incarnation: int, *, lines: int, most_bytes: int) -> list[str]:
    """The text of the last lines of a process, `most_bytes` together at most."""
    parts = [one for one in list_parts(folder, LogQuery(vertex=vertex)) if one.incarnation == incarnation]
    found: list[str] = []
    left = most_bytes
    for part in reversed(parts):
        for line in _lines_back(part, part.size):
            if not line.text:
                continue
            left -= len(line.text) + 1
            if len(found) == lines or left < 0:
                return found[::-1]
            found.append(_text(line))
    return found[::-1]


def list_parts(folder: Path, query: LogQuery) -> list[_Part]:
    """By vertex, incarnation and number. A folder that is not there has none."""
    older: dict[str, list[tuple[int, os.DirEntry[str]]]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name, _, suffix = entry.name.rpartition(".")
                if suffix == "log":
                    older.setdefault(entry.name, []).append((0, entry))
                elif name.endswith(".log") and suffix.isascii() and suffix.isdigit():
                    older.setdefault(name, []).append((int(suffix), entry))
    except FileNotFoundError:
        return []
    parts = []
    for file, entries_of in older.items():
        vertex, _, incarnation = file.removesuffix(".log").rpartition(".")
        if not vertex or not query.wants(vertex):
            continue
        newest = max(number for number, _ in entries_of) + 1
        for number, entry in entries_of:
            try:
                state = os.stat(entry.path, follow_symlinks=False)
            except OSError:
                continue  # it has another name now
            if not stat.S_ISREG(state.st_mode):  # a link may lead anywhere, and a pipe ends nowhere
                continue
            parts.append(
                _Part(
                    key=f"{file}.{number or newest}",
                    path=Path(entry.path),
                    file=file,
                    vertex=vertex,
                    incarnation=int(incarnation) if incarnation.isdigit() else 0,
                    number=number or newest,
                    inode=state.st_ino,
                    size=state.st_size,
                    mtime=state.st_mtime,
                )
            )
    return sorted(parts, key=lambda part: (part.vertex, part.incarnation, part.file, part.number))


# -- forward ----------------------------------------------------------------------------------------


def _forward(
    parts: list[_Part],
    query: LogQuery,
    finds: Finds | None,
    after: dict[str, int] | None,
    limit_bytes: int,
    now: float,
) -> dict[str, Any]:
    since = Stamps().of(query.since) if query.since is not None else b""
    until = Stamps().of(query.until) if query.until is not None else b""
    starts = {}
    for part in parts:
        if after is None:
            starts[part.key] = _place_of(part, since) if since else 0
        else:
            starts[part.key] = after.get(part.key, 0)
    offsets = dict(starts)
    kept: list[_Line] = []
    left, more = limit_bytes, False
    full = False
    lines = heapq.merge(
        *(_lines_on(part, starts[part.key], now) for part in parts if part.size > starts[part.key]),
        key=_BY_TIME,
    )
    wanted = LEVELS[LEVELS.index(query.level) if query.level else 0 :]
    for batch, scan_ended in _batches(lines, wanted, since, until):
        hits = batch.candidates
        if finds is not None:
            found = finds([_text(batch.lines[at]) for at in hits])
            hits = [at for at, is_found in zip(hits, found, strict=True) if is_found]
        upto = len(batch.lines)
        for at in hits:
            line = batch.lines[at]
            if kept and left < len(line.text):
                upto, full = at, True
                break
            kept.append(line)
            left -= len(line.text) + 1
        for line in batch.lines[:upto]:
            offsets[line.part.key] = line.end
        if full or scan_ended:
            more = True
            break
    return {"lines": [_shown(line) for line in kept], "next": offsets, "more": more, "searched_from": None}


def _batches(
    lines: Iterable[_Line], wanted: str, since: bytes, until: bytes
) -> Iterator[tuple[_Batch, bool]]:
    """The lines in batches, and whether there may be more, though no more may be scanned."""
    batch, size, scanned = _Batch([], []), 0, 0
    for line in lines:
        if until and line.when > until:
            break  # they come in the order of time
        if line.level in wanted and line.stamp >= since:
            batch.candidates.append(len(batch.lines))
        batch.lines.append(line)
        size += len(line.text) + PREFIX_BYTES
        if size >= BATCH_BYTES:
            scanned += size
            yield batch, scanned >= SCAN_BYTES
            batch, size = _Batch([], []), 0
    yield batch, False


def _lines_on(part: _Part, start: int, now: float) -> Iterator[_Line]:
    """The lines of a part from `start` on. What stands there without a time has that of the line before."""
    stamp = _stamp_before(part, start)
    highest, at, rest = stamp, start, b""
    while True:
        block = _read(part, at + len(rest), BLOCK_BYTES)
        *lines, rest = (rest + block).split(b"\n")
        whole = len(lines)
        if len(rest) > LINE_BYTES or (rest and not block and now - part.mtime >= PARTIAL_S):
            lines.append(rest)
            rest = b""
        for number, line in enumerate(lines):
            at += len(line) + (number < whole)
            if is_stamped(line):
                stamp = line[:STAMP_BYTES]
                highest = max(highest, stamp)
            yield _line(part, highest, stamp, at, line)
        if not block:
            return


def _place_of(part: _Part, stamp: bytes, *, beyond: bool = False) -> int:
    """A place before which all lines are older than `stamp`, and near the first that is not; with `beyond` one from
    which on all are newer."""
    low, high = 0, part.size
    if Stamps().of(part.mtime + _CLOCKS_S) < stamp:
        return high  # it was written to for the last time before that
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        found = next(filter(is_stamped, _read(part, middle, BLOCK_BYTES).split(b"\n")[1:-1]), None)
        if found is None or found[:STAMP_BYTES] >= stamp:
            high = middle
        else:
            low = middle
    if beyond:
        return min(high + BLOCK_BYTES, part.size)
    if low == 0:
        return 0
    return low + _read(part, low, BLOCK_BYTES).find(b"\n") + 1


def _stamp_before(part: _Part, start: int) -> bytes:
    """The time of the line before `start`; without one that of the first after it, or of the file."""
    before = _read(part, max(start - BLOCK_BYTES, 0), min(start, BLOCK_BYTES)).split(b"\n")
    after = _read(part, start, BLOCK_BYTES).split(b"\n") if not any(map(is_stamped, before)) else []
    found = next(filter(is_stamped, [*reversed(before), *after]), None)
    return found[:STAMP_BYTES] if found is not None else Stamps().of(part.mtime)


# -- backward ---------------------------------------------------------------------------------------


class _LastLines:
    """What is kept of lines that come the last one first: at most `tail` of each of the `vertices`, and of all no more
    than fit into `limit_bytes`. Who has all of his is `done`."""

    def __init__(self, vertices: set[str], finds: Finds | None, tail: int | None, limit_bytes: int) -> None:
        self.kept: list[_Line] = []
        self.done: set[str] = set() if tail != 0 else set(vertices)
        self.searched_from = b""
        """The line before which nothing was looked at; empty while there is none."""
        self._vertices = vertices
        self._finds = finds
        self._tail = tail
        self._left = limit_bytes
        self._counts: dict[str, int] = {}

    def take(self, batch: list[_Line]) -> bool:
        """Keep what is wanted. Returns whether there is room for more."""
        if self._finds is not None:
            found = self._finds([_text(line) for line in batch])
            batch = [line for line, is_found in zip(batch, found, strict=True) if is_found]
        for line in batch:
            if line.vertex in self.done:
                continue
            if self.kept and self._left < len(line.text):
                self.searched_from = line.when
                return False
            self.kept.append(line)
            self._left -= len(line.text) + 1
            self._counts[line.vertex] = self._counts.get(line.vertex, 0) + 1
            if self._counts[line.vertex] == self._tail:
                self.done.add(line.vertex)
        return not self._vertices <= self.done


def _backward(
    parts: list[_Part],
    query: LogQuery,
    finds: Finds | None,
    tail: int | None,
    limit_bytes: int,
    now: float,
) -> dict[str, Any]:
    since = Stamps().of(query.since) if query.since is not None else b""
    until = Stamps().of(query.until) if query.until is not None else b""
    ends = {part.key: _whole_until(part, now) for part in parts}
    last = _LastLines({part.vertex for part in parts}, finds, tail, limit_bytes)
    wanted = LEVELS[LEVELS.index(query.level) if query.level else 0 :]
    batch: list[_Line] = []
    size, scanned = 0, 0
    most = BATCH_BYTES if finds is not None else 1
    for line in _merged_back(parts, ends, until, last.done):
        if not line.level:
            continue  # it only says when its file was written
        if line.stamp < since:
            if line.when < since:
                break
            continue
        scanned += len(line.text) + PREFIX_BYTES
        if line.level in wanted and not (until and line.stamp > until):
            batch.append(line)
            size += len(line.text) + PREFIX_BYTES
            if size >= most:
                if not last.take(batch):
                    batch = []
                    break
                batch, size = [], 0
        if scanned >= SCAN_BYTES:
            last.searched_from = line.when
            break
    last.take(batch)
    return {
        "lines": [_shown(line) for line in reversed(last.kept)],
        "next": ends,
        "more": False,
        "searched_from": time_of(last.searched_from) if last.searched_from else None,
    }


def _merged_back(
    parts: list[_Part], ends: Mapping[str, int], until: bytes, done: Container[str]
) -> Iterator[_Line]:
    """The lines of all parts before their `ends`, and not after `until` where that is given, the last one first."""
    return heapq.merge(
        *(
            _lines_back(
                part,
                min(ends[part.key], _place_of(part, until, beyond=True) if until else part.size),
                done,
            )
            for part in parts
            if part.vertex not in done
        ),
        key=_BY_TIME,
        reverse=True,
    )


def _lines_back(part: _Part, end: int, done: Container[str] = ()) -> Iterator[_Line]:
    """The lines of a part before `end`, the last one first, after one that is no line: it says when the file was
    written last, so that it is opened only when its time has come. Ends when its vertex is `done`."""
    lowest = Stamps().of(part.mtime + _CLOCKS_S)
    yield _Line(lowest, part.vertex, part.incarnation, part.number, -1, "", b"", lowest, part)
    if part.vertex in done or end == 0:
        return
    end -= _read(part, end - 1, 1) == b"\n"
    untimed: list[bytes] = []
    rest, block_bytes, place = b"", FIRST_BLOCK_BYTES, part.size + 1
    while True:
        start = max(end - block_bytes, 0)
        first, *lines = (_read(part, start, end - start) + rest).split(b"\n")
        if start == 0 or len(first) > LINE_BYTES:
            lines.insert(0, first)
            first = b""
        for number in range(len(lines) - 1, -1, -1):
            untimed.append(lines[number])
            if is_stamped(lines[number]):
                stamp = lines[number][:STAMP_BYTES]
            elif (number or start) and len(untimed) < _MOST_UNTIMED:
                continue
            else:
                stamp = _stamp_before(part, start)
            lowest = min(lowest, stamp)
            for line in untimed:
                yield _line(part, lowest, stamp, place, line)
                place -= 1
                if part.vertex in done:
                    return
            untimed = []
        if start == 0:
            return
        rest, end, block_bytes = first, start, BLOCK_BYTES


def _whole_until(part: _Part, now: float) -> int:
    """The end of the part's last line that is at its end."""
    if now - part.mtime >= PARTIAL_S:
        return part.size
    start = max(part.size - LINE_BYTES, 0)
    found = _read(part, start, part.size - start).rfind(b"\n")
    return start + found + 1 if found >= 0 or not start else part.size


# -- one line ---------------------------------------------------------------------------------------


def _read(part: _Part, start: int, most: int) -> bytes:
    """Of the bytes that the part had when it was listed. Empty if it is another file by now."""
    most = min(most, part.size - start)
    if most <= 0:
        return b""
    try:
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, most, start) if os.fstat(descriptor).st_ino == part.inode else b""
    finally:
        os.close(descriptor)


def _line(part: _Part, when: bytes, stamp: bytes, end: int, line: bytes) -> _Line:
    if is_stamped(line):
        level, text = chr(line[STAMP_BYTES + 1]), line[PREFIX_BYTES:]
    else:
        level, text = level_in(line, "I"), line
    return _Line(when, part.vertex, part.incarnation, part.number, end, level, text, stamp, part)


def _text(line: _Line) -> str:
    return line.text.rstrip(b"\r").decode("utf-8", "replace")


def _shown(line: _Line) -> dict[str, Any]:
    return {
        "at": time_of(line.stamp),
        "level": line.level,
        "vertex": line.vertex,
        "incarnation": line.incarnation,
        "file": line.part.file,
        "text": _text(line),
    }
