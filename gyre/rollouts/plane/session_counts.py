"""What came of sessions since this manager began: how they ended, and why those that infrastructure ended did.

This module must not know what a session is made of.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from gyre.rollouts.plane.reported import SessionFault, SessionTotals
from gyre.rollouts.plane.session_tree import SessionOutcome

FAULTS_KEPT, REASON_SHOWN = 5, 300
"""The newest faults, and of the reason of each so many characters: they are told with every look at the plane."""


class SessionCounts:
    def __init__(self) -> None:
        self.outcomes: Counter[SessionOutcome] = Counter()
        """Of sessions whose ends are in the ledger."""
        self.turns = 0
        """Whose ends are."""
        self.drawn_again = 0
        """Attempts that were begun in the place of another one, of which nothing is trained."""
        self.faults: deque[tuple[str, str]] = deque(maxlen=FAULTS_KEPT)
        """Session and reason of each that infrastructure ended, the newest last."""

    def ended(self, session: str, outcome: SessionOutcome, reason: str) -> None:
        self.outcomes[outcome] += 1
        if outcome is SessionOutcome.INFRA_FAULT:
            self.faults.append((session, reason[:REASON_SHOWN]))

    def status(self) -> dict[str, Any]:
        """A `SessionTotals`."""
        return vars(
            SessionTotals(
                outcomes={str(outcome): self.outcomes[outcome] for outcome in SessionOutcome},
                turns=self.turns,
                drawn_again=self.drawn_again,
                faults=[vars(SessionFault(*fault)) for fault in reversed(self.faults)],
            )
        )
