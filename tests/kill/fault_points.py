"""Where a process of a test kills itself: at the very line, which no other process could hit.

DIR/fault names a point and a number: `tool 20`. The process that comes to this point for the 20th time ends by SIGKILL,
as if somebody else had sent it, and takes the file away, so that its successor lives.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from gyre.rollouts.plane.session_ledger import SessionLedger

TURN, TOOL, KEPT, TOLD, END, ENDED = "turn", "tool", "kept", "told", "end", "ended"
"""Of an agent: a turn is drawn; all of its sessions are in a tool; a snapshot is kept, and the next turn not asked for;
the same, and it takes the manager along; the end was sent, and nobody reads the answer; the answer to the end was
read."""

KEEPING, WRITTEN = "keeping", "written"
"""Of a manager: it has a snapshot that is not in the ledger; the snapshot is, and its agent was not told."""


class FaultPoints:
    def __init__(self, directory: Path) -> None:
        self._file = directory / "fault"
        self._seen: Counter[str] = Counter()

    def arm(self, point: str, number: int) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(f"{point} {number}")
        partial.rename(self._file)

    def due(self, point: str) -> bool:
        """Whether the process is to die at this point now, or as soon as it can there."""
        try:
            name, number = self._file.read_text().split()
        except FileNotFoundError:
            self._seen.clear()
            return False
        self._seen[point] += name == point
        return name == point and self._seen[point] >= int(number)

    def die(self) -> NoReturn:
        self._file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process outlived SIGKILL")


def watch_snapshots(points: FaultPoints) -> None:
    """The manager of this process dies at `KEEPING` and `WRITTEN`."""
    kept, committed = SessionLedger.keep_snapshot, SessionLedger.committed
    noted: set[str] = set()

    def keep(ledger: SessionLedger, *args: Any) -> Any:
        session = kept(ledger, *args)
        noted.add(session.id)
        if points.due(KEEPING):
            points.die()
        return session

    def commit(ledger: SessionLedger, *args: Any, **named: Any) -> Any:
        written = committed(ledger, *args, **named)
        for name in list(noted):
            session = ledger.sessions.get(name)
            if session is None or session.is_written:
                noted.discard(name)
                if points.due(WRITTEN):
                    points.die()
        return written

    SessionLedger.keep_snapshot, SessionLedger.committed = keep, commit  # type: ignore[method-assign]
