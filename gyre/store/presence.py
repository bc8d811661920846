"""Whether an SQLite file is still where it was opened, and still the same: a connection does not notice.

SQLite writes to the file that it opened. If that file is deleted, moved or replaced, every commit goes to a file
without a name, and is gone with the last process that has it open.

Invariants:
    Never-into-nothing  no commit is acknowledged unless the file stood at its path, as the same inode with the same
                        log, after it.
    Never-another       a file that was put in its place is refused, and neither written to nor taken over, whatever it
                        holds: other processes may still write to the first. The same file put back is accepted.
    Never-back          the count of commits in the database never falls. One that is lower than what this process has
                        seen is an older copy that was written over the file.
    Looked-at           the file is never opened here: closing any descriptor of it drops all locks of this process.
    Asked-unlocked      the disk is asked while no lock is held: a thread that waits for it, or after it to run again,
                        holds up no other. What looks wrong then is asked again under the lock, for another thread may
                        have noted what is newer.
    Answers-in-time     a look that the disk does not answer is the finding `HANGING`, and holds up nobody but a thread
                        of its own. What SQLite itself asks of such a disk cannot be bounded: the kernel ends neither
                        the call nor the thread that made it. A transaction that is under way then waits for the disk.

This file must not know the tables' meaning, or what is done about a finding.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gyre.clock import Clock
from gyre.errors import StoreLost

HANGS_AFTER_S = 5.0
"""How long a look at a file may take. A local disk answers in microseconds, a busy NFS server in a second or two."""

ANSWERED_FOR_S = 1.0
"""How long a look that was answered in time vouches for the next ones, which then cost no thread: a transaction can be
caught by a disk that begins to hang meanwhile, as SQLite can be in any case."""


class Lost(StrEnum):
    """What became of a store's file."""

    MISSING = "missing"
    REPLACED = "replaced"
    OLDER = "older"
    TRUNCATED = "truncated"
    LOG_REMOVED = "log_removed"
    READ_ONLY = "read_only"
    HANGING = "hanging"


_HINTS = {
    Lost.MISSING: "Put the same file back with `mv`, with its -wal and -shm files, and the job goes on.",
    Lost.REPLACED: "Put the first file back with `mv`. To go on from the other: end the job, then `gyre resume`.",
    Lost.OLDER: "Gyre does not write to it. Put the newer file back; to go on from the copy: end the job, then "
    "`gyre resume`.",
    Lost.TRUNCATED: "Gyre does not write to it. Restore it from a copy, then `gyre resume`.",
    Lost.LOG_REMOVED: "Put the same -wal and -shm files back, or end the job and look at what `gyre resume` finds.",
    Lost.READ_ONLY: "The file and its folder must be writable by this user, on a disk that is not read-only.",
    Lost.HANGING: "See whether the file system answers (NFS?); the job goes on once it does.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a store, as a sentence."""

    kind: Lost
    path: str
    sentence: str

    def error(self) -> StoreLost:
        return StoreLost(
            self.sentence, hint=_HINTS[self.kind], details={"path": self.path, "lost": str(self.kind)}
        )


@dataclass(frozen=True, slots=True)
class StoreMark:
    """Which store an SQLite file is, and how many commits it has counted."""

    store_id: str
    commits: int


@dataclass(frozen=True, slots=True)
class _Identity:
    device: int
    inode: int


Stat = Callable[[str], os.stat_result]


class Presence:
    """The file at `path` as this process has opened it. Safe to use from many threads."""

    def __init__(self, path: Path, *, stat: Stat = os.stat, clock: Clock = time) -> None:
        self.path = path
        self.hangs_after_s = HANGS_AFTER_S
        self._clock = clock
        self._hanging: _Look | None = None
        self._answered_at = -ANSWERED_FOR_S
        self._stat = stat
        self._lock = threading.Lock()
        self._file: _Identity | None = None
        self._log: _Identity | None = None
        self._size_bytes = 0
        self._store_id = ""
        self._commits = 0
        self._durable = 0

    @property
    def commits(self) -> int:
        """The highest count of commits that this process has seen."""
        return self._commits

    @property
    def mark(self) -> StoreMark | None:
        """This process's last commit that a loss of power does not undo; None before there is one."""
        with self._lock:
            return StoreMark(self._store_id, self._durable) if self._durable else None

    def committed(self, commits: int) -> None:
        """A commit with this count, and all before it, is on the disk."""
        with self._lock:
            self._durable = max(commits, self._durable)

    def short_of(self, mark: StoreMark) -> Finding | None:
        """What is wrong with the file as it was last read, compared with the mark that an earlier process left."""
        with self._lock:
            store_id, commits = self._store_id, self._commits
        if store_id != mark.store_id:
            return self._finding(Lost.REPLACED, "is another store than the job's")
        if commits < mark.commits:
            return self._finding(
                Lost.OLDER, f"is an older copy: it holds {commits} commits where {mark.commits} were seen"
            )
        return None

    def connected(self, *, first: bool) -> None:
        """A connection was made; `first`: no other of this process stands, so that the log may be a new one. Raises
        StoreLost where it is to another file than the earlier ones."""
        there = _identity(self._stat(str(self.path)))
        with self._lock:
            if self._file is None:
                self._file = there
            if first:
                self._log = None
        if there != self._file:
            raise self._replaced().error()

    def forget_log(self) -> None:
        """The log was emptied into the file, and every connection to it closed."""
        with self._lock:
            self._log = None

    def accept_size(self) -> None:
        """The file is smaller, and whole: it was compacted."""
        with self._lock:
            self._size_bytes = 0

    def note(self, store_id: str, commits: int, *, seen: int) -> None:
        """What a transaction read of the database's own identity, or left of it; `seen` is `commits` before it began.
        Raises StoreLost where it is another store, or an older copy of this one."""
        with self._lock:
            other = bool(self._store_id) and store_id != self._store_id
            older = not other and commits < seen
            if not other and not older:
                self._store_id, self._commits = store_id, max(commits, self._commits)
        if other:
            raise self._replaced().error()
        if older:
            raise self._finding(
                Lost.OLDER, f"is an older copy: it holds {commits} commits where {seen} were seen"
            ).error()

    def look(self, *, writes: bool = True) -> Finding | None:
        """What is wrong with the file, by its metadata; None if it is as it was. It may hang as the disk does."""
        try:
            found, log = self._ask()
            with self._lock:
                if self._file is None:
                    return None
                if not self._is_as_it_was(found, log) and (finding := self._judge(*self._ask())) is not None:
                    return finding
        except FileNotFoundError:
            return self._finding(Lost.MISSING, "is gone: it was deleted or moved")
        except OSError as error:
            return self._finding(Lost.MISSING, f"cannot be reached: {error.strerror}")
        if writes and not (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)):
            return self._finding(Lost.READ_ONLY, "can no longer be written: it or its folder is read-only")
        return None

    def look_within(
        self, look: Callable[[], Finding | None] | None = None, *, deadline_s: float | None = None
    ) -> Finding | None:
        """`look`, by default this file's own, with a deadline: not answering in time is the finding `HANGING`. The
        thread that hangs is left to the kernel, and none is added while it stands."""
        if self._hangs():
            return self._does_not_answer()
        looking = _Look(look or self.look)
        looking.thread.join(self.hangs_after_s if deadline_s is None else deadline_s)
        if looking.thread.is_alive():
            self._hanging = looking
            return self._does_not_answer()
        self._answered_at = self._clock.monotonic()
        return looking.result()

    def look_often(self, *, writes: bool = True) -> Finding | None:
        """`look_within` for every transaction: it costs a thread only where no look was answered lately."""
        if self._hangs() or self._clock.monotonic() - self._answered_at >= ANSWERED_FOR_S:
            return self.look_within(lambda: self.look(writes=writes))
        return self.look(writes=writes)

    def _ask(self) -> tuple[os.stat_result, _Identity | None]:
        """The file's metadata, and which log it has; None: none. Raises OSError."""
        return self._stat(str(self.path)), self._identity_of(f"{self.path}-wal")

    def _is_as_it_was(self, found: os.stat_result, log: _Identity | None) -> bool:
        return (
            _identity(found) == self._file
            and found.st_size == self._size_bytes
            and log is not None
            and log == self._log
        )

    def _judge(self, found: os.stat_result, log: _Identity | None) -> Finding | None:
        """What is wrong with this; if nothing is, it is what later looks are compared with."""
        if _identity(found) != self._file:
            return self._replaced()
        if found.st_size < self._size_bytes:
            return self._finding(
                Lost.TRUNCATED, f"was truncated from {self._size_bytes} to {found.st_size} bytes"
            )
        self._size_bytes = found.st_size
        if self._log is None:
            self._log = log
        elif log != self._log:
            return self._finding(
                Lost.LOG_REMOVED, "has lost its write-ahead log: the -wal file was removed or replaced"
            )
        return None

    def _hangs(self) -> bool:
        return self._hanging is not None and self._hanging.thread.is_alive()

    def _does_not_answer(self) -> Finding:
        return self._finding(
            Lost.HANGING, f"does not answer: a look at it took more than {self.hangs_after_s:g} s"
        )

    def _replaced(self) -> Finding:
        return self._finding(Lost.REPLACED, f"was replaced: {self._what_is_there()} is in its place")

    def _what_is_there(self) -> str:
        """In words, what a file that was put in place holds. It is read alone, without its log and without a lock."""
        try:
            uri = f"{self.path.as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                (store_id, commits), *_ = connection.execute("SELECT store_id, commits FROM gyre_store")
        except (sqlite3.Error, ValueError):
            return "what is no Gyre store"
        if store_id != self._store_id:
            return "another store"
        return "an older copy of it" if commits < self._commits else "a copy of it"

    def _identity_of(self, path: str) -> _Identity | None:
        try:
            return _identity(self._stat(path))
        except OSError:
            return None

    def _finding(self, kind: Lost, what: str) -> Finding:
        return Finding(kind, str(self.path), f"The store {self.path} {what}.")


class _Look:
    def __init__(self, look: Callable[[], Finding | None]) -> None:
        self._found: Finding | None = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._found = look()
            except BaseException as error:  # raised to who waits for it
                self._error = error

        self.thread = threading.Thread(target=run, name="store-presence", daemon=True)
        self.thread.start()

    def result(self) -> Finding | None:
        if self._error is not None:
            raise self._error
        return self._found


def _identity(found: os.stat_result) -> _Identity:
    return _Identity(found.st_dev, found.st_ino)
