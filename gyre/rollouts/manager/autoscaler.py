"""The rollout manager's observations of its fleet, for the policy that says how many instances there should be.

An observation covers whole steps: within one, instances and the trainer take turns, so that a part of it would show one
of them idle. The trainer reports its waiting time, by its own clock.

Invariants:
- *asked once*: an advised change is not advised again until it came about, or did not for a while;
- *nobody to work for, nothing to learn*: while no trainer is attached nothing is observed.

This module must not know how instances are started, nor read the time: `now` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gyre.rollouts.protocol.frames import Pulse
from gyre.rollouts.scheduling.elasticity import ElasticPolicy, ElasticSettings, Observation

NO_STEP_S = 60.0
"""Length of an observation in which no step ends; if steps take longer, an observation covers two of them."""

ASK_AGAIN_S = 60.0
"""Time after which an advice without effect (there was no room, or the master was away) may be given again."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The instances that are there now. `placed` counts the role's own, `others` those that joined by themselves, both
    without draining ones. `serving` of them have a policy, `busy` have samples."""

    placed: int
    others: int
    serving: int
    busy: int
    queued_tokens: float
    rate_tokens_s: float
    cores_busy: float | None = None
    """Share of the cores in use since the last look, where the instances compute on those of this machine."""


@dataclass(frozen=True, slots=True)
class Advice:
    seen: int
    count: int
    reason: str
    observed: Observation


class Autoscaler:
    def __init__(self, settings: ElasticSettings) -> None:
        self._policy = ElasticPolicy(settings)
        self._shortest_s = settings.up_cooldown_s / settings.evidence
        """Shortest observation, such that a cool-down has room for all that it needs."""
        self._first: Pulse | None = None
        self._last: Pulse | None = None
        self._at = 0.0
        self._idle_s = self._serving_s = self._local_s = 0.0
        self._cores_s = self._cores_busy_s = 0.0
        self._steps = 0
        self._steps_since: float | None = None
        self._step_at: float | None = None
        self._step_s = 0.0
        self._asked: tuple[int, int] | None = None
        self._asked_at = -math.inf

    def detached(self) -> None:
        """Drop the present observation, because there is no trainer."""
        self._first = self._last = None
        self._step_at = None

    def pulse(self, pulse: Pulse, now: float) -> None:
        self._last = pulse
        if self._first is None:
            self._begin(now)

    def step_done(self, now: float) -> None:
        """Note that a step ended: a policy was published."""
        self._steps += 1
        if self._step_at is not None:
            self._step_s = now - self._step_at
        self._step_at = now

    def look(self, fleet: Fleet, now: float, *, window_open: bool = False) -> Advice | None:
        """The policy's advice, if any; called every so often. `window_open` says that the trainer's devices
        generate."""
        first, last = self._first, self._last
        if first is None or last is None:
            return None
        passed = now - self._at
        self._at = now
        self._serving_s += fleet.serving * passed
        self._idle_s += max(0, fleet.serving - fleet.busy) * passed
        self._local_s += passed if window_open else 0.0
        if fleet.cores_busy is not None:
            self._cores_s += passed
            self._cores_busy_s += fleet.cores_busy * passed
        wanted = last.wanted
        urgent = not wanted and not fleet.others and fleet.queued_tokens > 0
        outside = not self._policy.settings.min <= wanted <= self._policy.settings.max
        if not (urgent or outside or self._is_whole(last.at_s - first.at_s)):
            return None
        observation = self._observation(fleet, first, last)
        if not (urgent or outside):
            self._begin(now)
        if self._asked is not None and self._asked[0] == wanted and now - self._asked_at < ASK_AGAIN_S:
            return None
        scale = self._policy.decide(observation, now)
        if scale is None:
            return None
        if scale.target != wanted:
            self._asked, self._asked_at = (wanted, scale.target), now
        return Advice(wanted, scale.target, scale.reason, observation)

    def _begin(self, now: float) -> None:
        self._first, self._at = self._last, now
        self._steps, self._steps_since = 0, self._step_at
        self._idle_s = self._serving_s = self._local_s = self._cores_s = self._cores_busy_s = 0.0

    def _is_whole(self, observed_s: float) -> bool:
        if observed_s < self._shortest_s or observed_s <= 0:
            return False
        return self._steps > 0 or observed_s >= max(NO_STEP_S, 2.0 * self._step_s)

    def _observation(self, fleet: Fleet, first: Pulse, last: Pulse) -> Observation:
        observed_s = max(last.at_s - first.at_s, 1e-9)
        local = min(1.0, self._local_s / observed_s)
        waited = min(1.0, (last.waited_s - first.waited_s) / observed_s)
        there = min(fleet.placed, last.wanted)
        return Observation(
            instances=last.wanted,
            starting=last.wanted - there,
            others=fleet.others,
            trainer_wait_share=round(max(0.0, waited - local), 4),
            local_share=round(local, 4),
            idle_share=round(self._idle_s / self._serving_s, 4) if self._serving_s > 0 else 0.0,
            queued_tokens=round(fleet.queued_tokens, 1),
            rate_tokens_s=round(fleet.rate_tokens_s, 1),
            step_s=round(self._mean_step_s(), 4),
            cores_busy=round(self._cores_busy_s / self._cores_s, 4) if self._cores_s > 0 else None,
        )

    def _mean_step_s(self) -> float:
        """From the end of the last step before the observation to the end of its last one."""
        if not self._steps or self._step_at is None or self._steps_since is None:
            return 0.0
        return (self._step_at - self._steps_since) / self._steps
