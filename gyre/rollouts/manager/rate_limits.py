"""How often one peer may do something: buckets of tokens, by peer.

Invariant *bounded*: as many buckets as `most`; the one that was not asked for longest is forgotten first.

This module reads no clock: `now` is an argument. It must not know what is limited.
"""

from __future__ import annotations

from collections.abc import Hashable


class RateLimit:
    """`each_s` a second in the long run, `burst` at once."""

    def __init__(self, burst: float, each_s: float, *, most: int = 4096) -> None:
        self._burst, self._each_s, self._most = burst, each_s, most
        self._buckets: dict[Hashable, tuple[float, float]] = {}
        """What is left, and as of when."""

    def wait_s(self, peer: Hashable, now: float, *, cost: float = 1.0) -> float:
        """Take `cost` and return 0, or take nothing and return how long the peer has to wait."""
        left, at = self._buckets.pop(peer, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._each_s)
        taken = cost if left >= min(cost, self._burst) else 0.0
        self._buckets[peer] = (left - taken, now)
        if len(self._buckets) > self._most:
            del self._buckets[next(iter(self._buckets))]
        return 0.0 if taken else (min(cost, self._burst) - left) / self._each_s
