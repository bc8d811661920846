"""The elasticity policy: how many rollout instances a role of `elastic(min, max)` should have.

The policy asks for more while the trainer's GPUs do anything but train, and for fewer while instances are idle. It
computes the number from the share of a step to be gained or given back, and the rate of one instance. It compares the
expected gain of an earlier raise with the real one: if the longest sample or the trainer bounds the step, further
instances cost and gain nothing.

Invariants:
- *within bounds*: a target is between min and max, and is given at once when the number is not;
- *no flapping*: otherwise a target is given only after several observations in a row agree, not within a cool-down, and
  never so low that the same observation would ask for more again;
- *explained*: each target comes with one sentence for the journal.

This module must not know how instances are started, nor read the time: `now` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    min: int
    max: int
    wait_share: float = 0.10
    """Share of a step without training that is accepted."""
    idle_share: float = 0.20
    """Share of a step for which instances may be idle."""
    evidence: int = 3
    """Number of observations in a row that have to agree."""
    up_cooldown_s: float = 60.0
    down_cooldown_s: float = 300.0
    up_factor: float = 2.0
    """Largest factor of one raise."""
    worth: float = 0.25
    """Share of the expected gain from which on a raise was worth it."""
    plateau_s: float = 1800.0
    """How long the policy remembers a number beyond which nothing was gained."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise ValueError(f"elastic({self.min}, {self.max}); min is within 0 and max, and max at least 1")


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation of one step, or of the last minute if there are no steps."""

    instances: int
    """Instances that are there or starting, except draining ones."""
    starting: int = 0
    """The number of these that are starting."""
    others: int = 0
    """Instances that do the same work but join and leave by themselves, outside of the policy."""
    trainer_wait_share: float = 0.0
    """Share of the time in which the trainer waited for samples."""
    local_share: float = 0.0
    """Share of the time in which the trainer's devices generated instead of training."""
    idle_share: float = 0.0
    """Share of the time in which an instance had nothing to do, on average."""
    queued_tokens: float = 0.0
    """Predicted tokens of samples that no instance has."""
    rate_tokens_s: float = 0.0
    """Tokens/s of all instances together."""


@dataclass(frozen=True, slots=True)
class Scale:
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Raise:
    """An earlier raise, kept to measure its gain."""

    after: int
    lack: float
    expected_lack: float


class ElasticPolicy:
    def __init__(self, settings: ElasticSettings) -> None:
        self.settings = settings
        self._says = 0
        """The direction of the last observations."""
        self._in_a_row = 0
        self._scaled_at = -math.inf
        self._raised: _Raise | None = None
        self._plateau: int | None = None
        self._plateau_at = -math.inf

    def decide(self, observation: Observation, now: float) -> Scale | None:
        """The number that there should be; None if it should not change."""
        settings, count = self.settings, observation.instances
        if count < settings.min or count > settings.max:
            self._changed(now)
            target, bound = (settings.min, "min") if count < settings.min else (settings.max, "max")
            return Scale(target, f"{_are(count)} there, and {bound} is {target}.")
        if not count and not observation.others and observation.queued_tokens > 0:
            self._changed(now)
            return Scale(1, "No instance is there, and samples wait.")

        self._check_last_raise(observation, now)
        lack = observation.trainer_wait_share + observation.local_share
        target = self._target(observation, lack)
        says = (target > count) - (target < count)
        self._in_a_row = self._in_a_row + 1 if says == self._says else 1
        self._says = says
        cooldown_s = settings.up_cooldown_s if says > 0 else settings.down_cooldown_s
        if not says or self._in_a_row < settings.evidence or now - self._scaled_at < cooldown_s:
            return None
        if says > 0:
            return self._up(observation, lack, target, now)
        self._changed(now)
        return Scale(
            target,
            f"Instances were idle for {observation.idle_share:.0%} of the time and the trainer lacked"
            f" {lack:.0%}; {target} instead of {count} suffice.",
        )

    def _target(self, observation: Observation, lack: float) -> int:
        settings, count, others = self.settings, observation.instances, observation.others
        if lack > settings.wait_share:
            if observation.starting or (self._plateau is not None and count >= self._plateau):
                return count
            # Training takes as long as before, and the time around it shrinks as the instances grow in number.
            needed = (count + others) * (1.0 - settings.wait_share) / max(1.0 - lack, 0.1) - others
            most = math.ceil((count + others) * settings.up_factor) - others
            return min(max(math.ceil(needed), count + 1), most, settings.max)
        if observation.idle_share > settings.idle_share and not self._is_behind(observation):
            # Fewer instances are busier; half of the permitted idle share stays as a reserve.
            busy = (count + others) * (1.0 - observation.idle_share)
            needed = math.ceil(busy / (1.0 - settings.idle_share / 2.0)) - others
            return max(
                min(needed, count), settings.min, 1 if observation.queued_tokens > 0 and not others else 0
            )
        return count

    def _is_behind(self, observation: Observation) -> bool:
        """Whether the queue is long, so that only some instances were idle, or only for a moment."""
        return observation.queued_tokens > observation.rate_tokens_s * self.settings.up_cooldown_s

    def _up(self, observation: Observation, lack: float, target: int, now: float) -> Scale:
        count, others = observation.instances, observation.others
        self._changed(now)
        gain = (target + others) / (count + others)
        self._raised = _Raise(target, lack, max(1.0 - (1.0 - lack) * gain, 0.0))
        return Scale(
            target,
            f"The trainer did not train for {lack:.0%} of the time (it waited {observation.trainer_wait_share:.0%} and"
            f" generated {observation.local_share:.0%}); {target} instances instead of {count} make up for it.",
        )

    def _check_last_raise(self, observation: Observation, now: float) -> None:
        """Compare the last raise with its expected gain, after the new instances had time to show it."""
        if self._plateau is not None and now - self._plateau_at >= self.settings.plateau_s:
            self._plateau = None
        raised = self._raised
        if raised is None or observation.starting or now - self._scaled_at < self.settings.up_cooldown_s:
            return
        self._raised = None
        if observation.instances < raised.after:
            return  # the instances never came
        lack = observation.trainer_wait_share + observation.local_share
        if raised.lack - lack < self.settings.worth * (raised.lack - raised.expected_lack):
            self._plateau, self._plateau_at = raised.after, now

    def _changed(self, now: float) -> None:
        self._scaled_at = now
        self._in_a_row = 0
        self._raised = None


def _are(count: int) -> str:
    return "1 instance is" if count == 1 else f"{count} instances are"
