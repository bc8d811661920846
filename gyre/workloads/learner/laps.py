"""How long each part of something took, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable


class Laps:
    """From its making on. `now` gives seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._at = now()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Since the last lap it was `name`."""
        now = self._now()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._at
        self._at = now

    def __str__(self) -> str:
        """`7.3 s: imports 4.1, ranks 1.2, model 2.0`"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"{self._at - self._began:.1f} s: {parts}"
