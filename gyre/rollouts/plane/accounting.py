"""The rollout plane's token account: `generated = delivered + in flight + discarded`.

This module must not know where tokens are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TokenAccount:
    """Counts tokens. `generated` is counted where tokens come in and the others where they end up, so that a hole
    shows."""

    generated: int = 0
    delivered: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    """By reason."""
    samples_delivered: int = 0
    samples_quarantined: int = 0

    def lost(self, reason: str, tokens: int) -> None:
        """Count tokens that were generated but never came in."""
        if tokens > 0:
            self.generated += tokens
            self.discarded[reason] += tokens

    def counters(self) -> dict[str, Any]:
        return {
            "generated": self.generated,
            "delivered": self.delivered,
            "discarded": dict(self.discarded),
            "samples_delivered": self.samples_delivered,
            "samples_quarantined": self.samples_quarantined,
        }

    def restore(self, counters: dict[str, Any]) -> None:
        self.generated = counters.get("generated", 0)
        self.delivered = counters.get("delivered", 0)
        self.discarded = Counter(counters.get("discarded", {}))
        self.samples_delivered = counters.get("samples_delivered", 0)
        self.samples_quarantined = counters.get("samples_quarantined", 0)
