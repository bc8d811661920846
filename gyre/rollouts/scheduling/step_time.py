"""How long a decode step of an engine takes, by how many samples run: `a + c * running`, fitted to what it measured.

An engine's step is nearly flat while few samples run, for it reads all weights whatever it does, and grows with each
sample then. So half of the samples do not take half as long, and what another instance saves follows from the slope.

Invariants:
- *never negative*: a step with more samples is predicted to take as long or longer, and no step less than nothing;
- *forgetting*: a measurement weighs `KEPT` of itself after the next one, so that an engine that became slow is known to
  be.

This module must not know what a sample is.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.95
"""At four measurements a second, the last five seconds are what counts."""

FLAT = 0.5
"""Share of the step that is taken not to grow, where all that was measured was at one load."""

_DOUBT = 0.02
"""Weight of that, beside what the measurements say, by the square of the mean load."""


@dataclass(slots=True)
class StepTime:
    weight: float = 0.0
    _running: float = 0.0
    _seconds: float = 0.0
    _running_squared: float = 0.0
    _running_seconds: float = 0.0

    def observe(self, running: float, seconds: float) -> None:
        """With `running` samples a step took `seconds`; both are above 0."""
        self.weight = KEPT * self.weight + 1.0
        self._running = KEPT * self._running + running
        self._seconds = KEPT * self._seconds + seconds
        self._running_squared = KEPT * self._running_squared + running * running
        self._running_seconds = KEPT * self._running_seconds + running * seconds

    def at(self, running: float) -> float:
        """Seconds of a step with so many samples. Only after a measurement."""
        mean, seconds = self._running / self.weight, self._seconds / self.weight
        spread = max(self._running_squared / self.weight - mean * mean, 0.0)
        together = self._running_seconds / self.weight - mean * seconds
        doubt = _DOUBT * mean * mean
        steepest = seconds / mean
        slope = (together + doubt * (1.0 - FLAT) * steepest) / (spread + doubt)
        return seconds + min(max(slope, 0.0), steepest) * (running - mean)
