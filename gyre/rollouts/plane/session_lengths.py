"""How long the sessions are that are trained, beside all that were drawn, where groups have more members than are
trained: those that end first are shorter than the others, and nothing but these numbers says by how much.

This module must not know how a session ends, or who trains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre.rollouts.plane.session_tree import LedgerSession


@dataclass(slots=True)
class _Lengths:
    sessions: int = 0
    tokens: int = 0
    timed: int = 0
    seconds: float = 0.0

    def add(self, session: LedgerSession, now: float) -> None:
        """Until `now` where it has not ended."""
        self.sessions += 1
        self.tokens += session.drawn
        if session.given_at:  # else an earlier manager handed it out, or nobody
            self.timed += 1
            self.seconds += (session.ended_at or now) - session.given_at

    def told(self) -> dict[str, float]:
        return {
            "sessions": self.sessions,
            "tokens": round(self.tokens / self.sessions, 1) if self.sessions else 0.0,
            "seconds": round(self.seconds / self.timed, 2) if self.timed else 0.0,
        }


@dataclass(slots=True)
class SessionLengths:
    """Since the manager began."""

    groups: int = 0
    _trained: _Lengths = field(default_factory=_Lengths)
    _drawn: _Lengths = field(default_factory=_Lengths)

    def completed(
        self, trained: Sequence[LedgerSession], others: Sequence[LedgerSession], now: float
    ) -> None:
        """A group is complete with these sessions; the others of it are cancelled."""
        self.groups += 1
        for session in trained:
            self._trained.add(session, now)
        for session in (*trained, *others):
            self._drawn.add(session, now)

    def told(self) -> dict[str, object]:
        """`trained` and `drawn`: how many sessions, and the means of their drawn tokens and seconds. What was cancelled
        counts as far as it had come, so that the true mean of all is larger than that of `drawn`."""
        return {"groups": self.groups, "trained": self._trained.told(), "drawn": self._drawn.told()}
