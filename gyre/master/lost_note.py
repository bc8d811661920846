"""What a master last committed while its store is lost: a file in the job's directory, for clients that have no store
to read the job or its master's address from.

Invariants:
- *only meanwhile*: the master writes it when it notices the loss, and removes it once the store is back;
- *no journal*: nothing is decided by it, and a note that cannot be written or read is none.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

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
