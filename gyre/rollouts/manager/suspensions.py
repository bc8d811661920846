"""Suspended instances: until when each may not join, longer each time.

Invariant *bounded*: the last `NAMES_KEPT`.

This module must not know why an instance was suspended.
"""

from __future__ import annotations

from typing import NamedTuple

from gyre.rollouts.protocol.fields import LATER, refuse

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
