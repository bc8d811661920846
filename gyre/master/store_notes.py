"""Two files about the store in a job's directory: how far it had come when the master last looked, and, while it is
lost, what the master last committed.

By the mark the next master knows an older copy, or another store, that was put in the store's place while no master
ran. The note is for clients that have no store to read the job or its master's address from.

Invariants:
- *never ahead*: a mark says what was committed; an older one than the truth is harmless, and one that cannot be read
  is none;
- *blocks nothing*: the mark is written by a thread of its own, so a disk that hangs stops no watch;
- *the user has the last word*: `gyre resume` removes the mark, and so accepts a store that was restored from a copy;
- *only meanwhile*: the master writes the note when it notices the loss, and removes it once the store is back;
- *no journal*: nothing is decided by the note, and one that cannot be written or read is none.

Only SQLite is marked: nobody replaces PostgreSQL's files below a server that runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre.store import StoreMark

MARK_FILE = "store_mark.json"


class MarkWriter:
    """Keeps the mark in `directory`, for one writer at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: StoreMark | None = None
        self._thread: threading.Thread | None = None

    def keep(self, mark: StoreMark | None) -> None:
        """Write it if it is news; one that comes while another is written is left to the next call."""
        if mark is None or mark == self._written or (self._thread is not None and self._thread.is_alive()):
            return
        self._written = mark
        self._thread = threading.Thread(target=write_mark, args=(self._directory, mark), daemon=True)
        self._thread.start()


def write_mark(directory: Path, mark: StoreMark) -> None:
    partial = directory / f".{MARK_FILE}"
    with contextlib.suppress(OSError):  # the disk is full or gone: the mark before it stays
        partial.write_text(json.dumps(asdict(mark)))
        os.replace(partial, directory / MARK_FILE)


def read_mark(directory: Path) -> StoreMark | None:
    try:
        mark = StoreMark(**json.loads((directory / MARK_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return mark if isinstance(mark.store_id, str) and type(mark.commits) is int else None


def forget_mark(directory: Path) -> None:
    with contextlib.suppress(OSError):  # there is none
        (directory / MARK_FILE).unlink()


NOTE_FILE = "store_lost.json"


@dataclass(frozen=True, slots=True)
class LostNote:
    """A job as of `at`, the moment of the loss (seconds since 1970). `path` is its store's file."""

    path: str
    job_id: str
    name: str
    phase: str
    step: int
    url: str
    at: float


def write_note(directory: Path, note: LostNote) -> None:
    partial = directory / f".{NOTE_FILE}"
    with contextlib.suppress(OSError):  # the same disk may be gone or read-only
        partial.write_text(json.dumps(asdict(note)))
        os.replace(partial, directory / NOTE_FILE)


def remove_note(directory: Path) -> None:
    with contextlib.suppress(OSError):
        (directory / NOTE_FILE).unlink()


def notes_below(jobs: Path) -> list[LostNote]:
    """The notes in the directories of jobs, the newest first."""
    found = []
    for file in jobs.glob(f"*/{NOTE_FILE}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(LostNote(**json.loads(file.read_text())))
    return sorted(found, key=lambda note: note.at, reverse=True)
