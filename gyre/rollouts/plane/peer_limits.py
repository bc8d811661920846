"""How often one peer may do something, and when a suspended instance may join again.

Invariant *bounded*: of buckets and of suspensions only so many are kept, whatever peers call themselves; the one that
was not asked for longest is forgotten first.

This module reads no clock: `now` is an argument. It must not know what is limited, or why an instance was suspended.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from gyre.rollouts.protocol.fields import LATER, refuse


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


LONGEST_S = 3600.0
NAMES_KEPT = 1024


class _Suspension(NamedTuple):
    incarnation: str
    """The only one that it counts for; "" for all of the name."""
    times: int
    until: float


class Suspensions:
    def __init__(self) -> None:
        self._by_name: dict[str, _Suspension] = {}

    def add(self, name: str, incarnation: str, first_s: float, now: float) -> float:
        """Suspend an instance; returns for how long: twice as long as the last time, `first_s` the first time."""
        before = self._by_name.pop(name, None)
        count = before.times + 1 if before is not None and before.incarnation == incarnation else 1
        pause_s: float = min(LONGEST_S, first_s * 2 ** min(count - 1, 16))
        self._by_name[name] = _Suspension(incarnation, count, now + pause_s)
        if len(self._by_name) > NAMES_KEPT:
            del self._by_name[next(iter(self._by_name))]
        return pause_s

    def check(self, name: str, incarnation: str, now: float) -> None:
        """Raises FrameError where the instance may not join yet."""
        known = self._by_name.get(name)
        if known is not None and known.incarnation in ("", incarnation) and now < known.until:
            raise refuse(
                LATER,
                f"{name} had samples and sent no token of them: it may join again in {known.until - now:.0f} s",
            )
