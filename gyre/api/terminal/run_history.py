"""The history of a run as a watcher saw it: its rewards by step, the time of a step, and the estimated end.

A restarted trainer reports nothing for a while, and may come back a step or more behind; the history keeps the
trainer's last report, and counts each step once. Pure: `now` is an argument, in seconds of any steady clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.api.terminal.formats import waits_of

PACE_STEPS = 20
"""The last steps that the estimate uses: enough to even out one recovery, few enough to follow a change."""

NUMBERS = ("step", "steps", "step_s", "reward", "accuracy", "tokens_per_s", "version", "checkpoint_step")
"""The fields of a trainer's report that must be numbers."""

WORKING = ("running", "recovering")
"""Phases in which steps are made and the end can be estimated."""


class RunHistory:
    """The history of one run. `observe` takes views as they come."""

    def __init__(self) -> None:
        self.progress: dict[str, Any] = {}
        """The trainer's last report that was not empty, without fields of the wrong type."""
        self.rewards: list[float] = []
        """The reward of every step that was seen."""
        self._phase = ""
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    def recall(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Steps that were made before the first view, in order. Their times say nothing of the pace now."""
        rewards = [row["reward_mean"] for row in steps if isinstance(row.get("reward_mean"), int | float)]
        self.rewards = [*map(float, rewards[:-1]), *self.rewards]  # the first view has the last one

    def observe(self, view: Mapping[str, Any], now: float) -> None:
        self._phase = str(view["job"]["phase"])
        if not view["progress"]:
            return
        self.progress = _usual(view["progress"])
        step = self.progress.get("step") or 0
        if step <= (self._ends[-1][0] if self._ends else 0):
            return
        self._ends.append((step, now))
        reward = self.progress.get("reward")
        if isinstance(reward, int | float):
            self.rewards.append(float(reward))

    def step_s(self) -> float | None:
        """Seconds of a recent step, by the trainer's report until two steps were seen; None before any."""
        if len(self._ends) >= 2:
            (first, began), (last, ended) = self._ends[0], self._ends[-1]
            return (ended - began) / (last - first)
        seconds = self.progress.get("step_s")
        return float(seconds) if self._ends and isinstance(seconds, int | float) else None

    def remaining_s(self, now: float) -> float | None:
        """Seconds until the last step is done, at the recent pace; None if that is not known. It counts down within a
        step, but by one step's time at most, since a step that takes for ever is not progress."""
        seconds, steps = self.step_s(), int(self.progress.get("steps") or 0)
        if seconds is None or not steps or self._phase not in WORKING:
            return None
        step, ended = self._ends[-1]
        return max(max(steps - step, 0) * seconds - min(now - ended, seconds), 0.0)


def _usual(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The report without fields of the wrong type: a NaN comes as text, and a user's `fit()` may call anything
    `version`."""
    found = {
        key: value for key, value in progress.items() if key not in NUMBERS or isinstance(value, int | float)
    }
    return {**found, "waits": waits_of(progress)}
