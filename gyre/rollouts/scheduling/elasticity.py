"""The elasticity policy: how many rollout instances a role of `elastic(min, max)` should have.

The policy asks for more while the trainer's GPUs do anything but train, and for fewer while instances are idle. It
computes the number from the share of a step to be gained or given back, and the rate of one instance. It compares the
expected gain of an earlier raise with the real one: if the longest sample, the trainer or the machine bounds the step,
further instances cost and gain nothing, and are given back.

Invariants:
- *within bounds*: a target is between min and max, and is given at once when the number is not;
- *no flapping*: otherwise a target is given only after several observations in a row agree, not within a cool-down, and
  never so low that the same observation would ask for more again;
- *no instance against another*: where instances compute on cores, none is added while all cores are in use;
- *what does not help goes*: a raise after which steps are not faster is taken back, and not repeated for a while;
- *explained*: each target comes with one sentence for the journal, and so does a raise that is wanted and not made.

This module must not know how instances are started, nor read the time: `now` is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
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
    cores_full: float = 0.9
    """Share of the cores in use from which on another instance only takes from those that are there."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise ValueError(f"elastic({self.min}, {self.max}); min is within 0 and max, and max at least 1")


@dataclass(frozen=True, slots=True)
class PlaneObservation:
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
    """Share of the time in which an instance had nothing to do, on average; 0 where that cannot be told yet."""
    queued_tokens: float = 0.0
    """Predicted tokens of samples that no instance has, at its end."""
    least_queued_tokens: float = 0.0
    """The fewest that there were in it."""
    rate_tokens_s: float = 0.0
    """Tokens/s of all instances together."""
    step_s: float = 0.0
    """Mean length of the steps that ended in it; 0: none did."""
    cores_busy: float | None = None
    """Share of the cores in use, where instances compute on the cores of one machine; else None."""

    @property
    def lack(self) -> float:
        """Share of the time in which the trainer's devices did not train."""
        return self.trainer_wait_share + self.local_share


@dataclass(frozen=True, slots=True)
class Scale:
    target: int
    """The number that there should be; the present one if a raise is wanted and cannot help."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Raise:
    """An earlier raise, kept to measure its gain: how things stood before it, and are expected to stand after it."""

    before: int
    after: int
    lack: float
    expected_lack: float
    step_s: float
    expected_step_s: float


class ElasticPolicy:
    """`of_fleet`: the reasons speak of samples that wait, for there is no trainer."""

    def __init__(self, settings: ElasticSettings, *, of_fleet: bool = False) -> None:
        self.settings = settings
        self._lacked = "Samples waited for a place for" if of_fleet else "The trainer did not train for"
        self._of_fleet = of_fleet
        self._says = 0
        """The direction of the last observations."""
        self._in_a_row = 0
        self._scaled_at = -math.inf
        self._recent: deque[PlaneObservation] = deque(maxlen=settings.evidence)
        """Observations of the present number, since it settled."""
        self._raised: _Raise | None = None
        self._plateau: int | None = None
        self._plateau_at = -math.inf
        self._told_full = False

    def decide(self, observation: PlaneObservation, now: float) -> Scale | None:
        """The number that there should be; None if it should not change, or if that was said already."""
        settings, count = self.settings, observation.instances
        if count < settings.min or count > settings.max:
            self._changed(now)
            target, bound = (settings.min, "min") if count < settings.min else (settings.max, "max")
            return Scale(target, f"{_are(count)} there, and {bound} is {target}.")
        if not count and not observation.others and observation.queued_tokens > 0:
            self._changed(now)
            return Scale(1, "No instance is there, and samples wait.")

        back = self._take_back(observation, now)
        if back is not None:
            return back
        lack = observation.lack
        target = self._target(observation, lack)
        says = (target > count) - (target < count)
        self._in_a_row = self._in_a_row + 1 if says == self._says else 1
        self._says = says
        cooldown_s = settings.up_cooldown_s if says > 0 else settings.down_cooldown_s
        if not says or self._in_a_row < settings.evidence or now - self._scaled_at < cooldown_s:
            return None
        if says > 0:
            if observation.cores_busy is not None and observation.cores_busy >= settings.cores_full:
                return self._held_by_cores(observation, lack)
            return self._up(observation, lack, target, now)
        self._changed(now)
        return Scale(
            target,
            f"Instances were idle for {observation.idle_share:.0%} of the time and"
            f" {'samples waited for' if self._of_fleet else 'the trainer lacked'} {lack:.0%}; {target} instead of"
            f" {count} suffice.",
        )

    def _target(self, observation: PlaneObservation, lack: float) -> int:
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

    def _is_behind(self, observation: PlaneObservation) -> bool:
        """Whether the queue is long, so that only some instances were idle, or only for a moment. With a trainer it has
        to have been long all the time: a step ends by asking for the next one's samples, so at the end of an
        observation it always is."""
        queued = observation.queued_tokens if self._of_fleet else observation.least_queued_tokens
        return queued > observation.rate_tokens_s * self.settings.up_cooldown_s

    def _held_by_cores(self, observation: PlaneObservation, lack: float) -> Scale | None:
        """Said once, until something changes."""
        if self._told_full:
            return None
        self._told_full = True
        return Scale(
            observation.instances,
            f"{self._lacked} {lack:.0%} of the time, but {observation.cores_busy:.0%} of the machine's"
            " cores are in use: another instance would only take from those that are there.",
        )

    def _up(self, observation: PlaneObservation, lack: float, target: int, now: float) -> Scale:
        count, others = observation.instances, observation.others
        recent = list(self._recent) or [observation]
        self._changed(now)
        gain = (target + others) / (count + others)
        step_s = _mean_step_s(recent)
        self._raised = _Raise(
            before=count,
            after=target,
            lack=lack,
            expected_lack=max(1.0 - (1.0 - lack) * gain, 0.0),
            step_s=step_s,
            expected_step_s=step_s * max(1.0 - lack, 1.0 / gain),
        )
        shares = (
            f" (it waited {observation.trainer_wait_share:.0%} and generated {observation.local_share:.0%})"
        )
        return Scale(
            target,
            f"{self._lacked} {lack:.0%} of the time{'' if self._of_fleet else shares}; {target} instances instead of"
            f" {count} make up for it.",
        )

    def _take_back(self, observation: PlaneObservation, now: float) -> Scale | None:
        """Compare the last raise with its expected gain, once as many observations as a decision needs were made of the
        new instances, after the cool-down in which they start and warm up."""
        if self._plateau is not None and now - self._plateau_at >= self.settings.plateau_s:
            self._plateau = None
        raised = self._raised
        if observation.starting or (
            raised is not None and now - self._scaled_at < self.settings.up_cooldown_s
        ):
            self._recent.clear()
            return None
        self._recent.append(observation)
        if raised is None or len(self._recent) < self.settings.evidence:
            return None
        if observation.instances != raised.after:
            self._raised = None
            return None  # the instances never came, or somebody else has changed the number
        step_s = _mean_step_s(self._recent)
        lack = sum(one.lack for one in self._recent) / len(self._recent)
        if sum(one.idle_share for one in self._recent) / len(self._recent) > self.settings.idle_share:
            self._raised = None
            return None  # something else makes steps long; whether the instances are needed is decided by that share
        if raised.step_s and step_s:
            expected, gained = raised.step_s - raised.expected_step_s, raised.step_s - step_s
            found = f"A step took {raised.step_s:.3g} s with {raised.before} and {step_s:.3g} s with {raised.after}"
        else:
            expected, gained = raised.lack - raised.expected_lack, raised.lack - lack
            found = (
                f"{self._lacked} {raised.lack:.0%} of the time with {raised.before} instances, and for {lack:.0%} with"
                f" {raised.after}"
            )
        self._raised = None
        if gained >= self.settings.worth * expected:
            return None
        self._plateau, self._plateau_at = raised.before, now
        self._changed(now)
        return Scale(raised.before, f"{found}: the added instances do not help, and are given back.")

    def _changed(self, now: float) -> None:
        self._scaled_at = now
        self._in_a_row = 0
        self._raised = None
        self._recent.clear()
        self._told_full = False


def _mean_step_s(observations: Iterable[PlaneObservation]) -> float:
    """0 where no step ended in any of them."""
    lengths = [one.step_s for one in observations if one.step_s]
    return sum(lengths) / len(lengths) if lengths else 0.0


def _are(count: int) -> str:
    return "1 instance is" if count == 1 else f"{count} instances are"
