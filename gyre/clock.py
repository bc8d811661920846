"""What tells the time: the module `time` is one, and tests have one that moves only when they say so
(`gyre.testing.clock`).

This module must not know who asks.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Both clocks of a machine, in seconds."""

    def time(self) -> float:
        """Since 1970. It may be set, and then jumps."""

    def monotonic(self) -> float:
        """Since any moment. It never falls."""


class SleepingClock(Clock, Protocol):
    """One that a thread can wait for."""

    def sleep(self, seconds: float, /) -> None:
        """Return when it is so much later."""
