"""How far a store had come when the job's master last looked: a file in the job's directory. The next master knows by
it an older copy, or another store, that was put in the store's place while no master ran.

Invariants:
- *never ahead*: a mark says what was committed; an older one than the truth is harmless, and one that cannot be read is
  none;
- *holds nobody up*: it is written by a thread that nobody waits for, so a disk that hangs stops no watch;
- *the user has the last word*: `gyre resume` removes it, and so accepts a store that was restored from a copy.

Only SQLite is marked: nobody replaces PostgreSQL's files below a server that runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict
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
        return StoreMark(**json.loads((directory / MARK_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget_mark(directory: Path) -> None:
    with contextlib.suppress(OSError):  # there is none
        (directory / MARK_FILE).unlink()
