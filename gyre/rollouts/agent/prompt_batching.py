"""How many of the waiting samples an engine is given now, where it stops drawing tokens while it reads prompts.

Each pass over prompts makes all running samples wait; each free slot that waits for the next pass is idle. The samples
that wait are given when the free slots have been idle for as long as the pass will cost: the rule of ski rental. With
`r` running samples, a pass of `p` seconds beside the time that its tokens take, and `f` slots freed a second, batches
of `sqrt(2 f r p)` samples follow, which is the size at which the sum of both costs is smallest (the economic order
quantity of Harris, 1913).

That weighs slots, not time: the last three samples of a training step, beside two hundred free slots, would wait for
seconds, and the step with them. So while there is a free slot for all that wait, they wait for at most `PATIENCE`
passes, which costs those that run at most one part in `PATIENCE` + 1.

This module must not know what a sample is, or how an engine is asked.
"""

from __future__ import annotations

import math
from collections import deque

PATIENCE = 8
"""The longest wait where there is a slot for all that wait, in passes over prompts."""

_PASSES = 32
"""The shortest of so many passes tells what a pass costs by itself: it read few tokens and waited for no step."""

_FEWEST_STEPS, _MOST_STEPS = 1.0, 5.0
"""Limits of that cost, in decode steps: a pass reads all weights once, as a step does, and mostly without a graph."""


class PromptBatching:
    """`max_running` slots. Times are seconds of one monotonic clock."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.step_s = 0.0
        """How long a decode step takes; 0 before it was measured."""
        self._passes: deque[float] = deque(maxlen=_PASSES)
        self._idle_s = 0.0
        """Slot-seconds since the last batch in which a free slot had a sample waiting for it."""
        self._idle = 0
        self._looked_at = 0.0
        self._roomy_since = math.inf
        """Since when there has been a free slot for each sample that waits; `inf` while there is none."""

    @property
    def pass_s(self) -> float:
        """What a pass over prompts makes a running sample wait, in seconds; 0 before it is known."""
        if not self._passes or not self.step_s:
            return 0.0
        return min(max(min(self._passes), _FEWEST_STEPS * self.step_s), _MOST_STEPS * self.step_s)

    def due(self, now: float, running: int, waiting: int) -> int:
        """How many of the waiting samples to give to the engine now, with so many running there."""
        self._idle_s += self._idle * max(now - self._looked_at, 0.0)
        self._looked_at = now
        free = max(self.max_running - running, 0)
        self._roomy_since = min(self._roomy_since, now) if 0 < waiting <= free else math.inf
        self._idle = min(free, waiting)
        if not self._idle or self.wait_s(running) > 0.0:
            return 0
        given, self._idle, self._idle_s, self._roomy_since = self._idle, 0, 0.0, math.inf
        return given

    def wait_s(self, running: int) -> float:
        """After `due` gave 0: how long until it gives more, if nothing changes until then. `inf` for never."""
        if not self._idle:
            return math.inf
        cost_s = running * self.pass_s - self._idle_s
        patience_s = self._roomy_since + PATIENCE * self.pass_s - self._looked_at
        return max(min(cost_s / self._idle, patience_s), 0.0)

    def passed(self, seconds: float) -> None:
        """From giving a batch to the first token of one of its samples."""
        self._passes.append(seconds)

    def stepped(self, seconds: float) -> None:
        """A decode step took this long."""
        self.step_s = seconds if not self.step_s else 0.7 * self.step_s + 0.3 * seconds
