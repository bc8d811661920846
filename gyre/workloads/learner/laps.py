"""How long each part of something took, one after the other."""

from __future__ import annotations

import time

from gyre.clock import Clock


class Laps:
    """From its making on."""

    def __init__(self, clock: Clock = time) -> None:
        self._clock = clock
        self._began = self._at = clock.monotonic()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Since the last lap it was `name`."""
        now = self._clock.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._at
        self._at = now

    def __str__(self) -> str:
        """`7.3 s: imports 4.1, ranks 1.2, model 2.0`"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"{self._at - self._began:.1f} s: {parts}"
