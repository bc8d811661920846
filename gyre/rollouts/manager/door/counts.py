"""What came of the requests at a fleet's door, since its manager started: how many were answered and failed, with how
many tokens and after how long, of each key.

This module must not know what a request asks for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from gyre.rollouts.plane.door_ledger import DoorRequest
from gyre.rollouts.plane.reported import KeyCounts, RequestCounts

RECENT = 512
"""Requests whose times are told: what a page shows is of late."""

KEYS_TOLD = 32
"""Keys that are told by name, those with the most."""

SLOW = 0.95
"""Of the recent requests so many were answered within what is told as slow."""


class DoorCounts:
    def __init__(self) -> None:
        self._answered: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._took_s: deque[float] = deque(maxlen=RECENT)

    def ended(self, some: Iterable[DoorRequest], now: float) -> None:
        """The end of these requests is in the ledger; `now` in seconds since 1970."""
        for known in some:
            key = key_of(known.owner)
            self._tokens[key] += known.tokens
            if known.failed:
                self._failed[key] += 1
            else:
                self._answered[key] += 1
                self._took_s.append(max(now - known.at, 0.0))

    def status(self) -> dict[str, Any]:
        """A `RequestCounts`."""
        took = sorted(self._took_s)
        return vars(
            RequestCounts(
                answered=self._answered.total(),
                failed=self._failed.total(),
                tokens=self._tokens.total(),
                median_s=took[len(took) // 2] if took else None,
                slow_s=took[min(int(len(took) * SLOW), len(took) - 1)] if took else None,
                keys={
                    key: vars(
                        KeyCounts(answered=self._answered[key], failed=self._failed[key], tokens=tokens)
                    )
                    for key, tokens in self._tokens.most_common(KEYS_TOLD)
                },
            )
        )


def key_of(owner: str) -> str:
    """The name of the key whose the request is."""
    return owner.partition(":")[0]
