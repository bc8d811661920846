"""The rollout manager's observations of its fleet, for the policy that says how many instances there should be.

An observation covers whole steps: within one, instances and the trainer take turns, so that a part of it would show one
of them idle. While the length of a step is not known, it says nothing of idle instances. The trainer reports its
waiting time, by its own clock.

Invariants:
- *asked once*: an advised change is not advised again until it came about, or did not for a while;
- *the next pool*: what a pool has no room for, others are asked for within seconds;
- *nobody to work for, nothing to learn*: while no trainer is attached nothing is observed.

This module must not know how instances are started, nor read the time: `now` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gyre.rollouts.protocol.frames import TrainerStatus
from gyre.rollouts.scheduling.elasticity import ElasticPolicy, ElasticSettings, PlaneObservation, Scale
from gyre.rollouts.scheduling.pools import Pool, in_all, share_out

NO_STEP_S = 60.0
"""Length of an observation in which no step ends; if steps take longer, an observation covers two of them."""

FIRST_STEPS_WITHIN_S = 1800.0
"""Until two policies were published nobody knows how long a step takes, and instances that stand idle may just wait for
the trainer's turn to end. A trainer that has come no further in so long has stopped."""

ASK_AGAIN_S = 60.0
"""Time after which an advice without effect (there was no room, or the master was away) may be given again."""

FOLLOW_S = 10.0
"""Time in which an advice is followed where there is room: after it another pool is asked. The master takes a second, a
new one some seconds."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The instances that are there now. `placed` counts each pool's own, `others` all others, both without draining
    ones. `serving` of them have a policy, `busy` have samples. `rates` are the tokens/s of one instance of each pool,
    where it generates."""

    placed: Mapping[str, int]
    others: int
    serving: int
    busy: int
    queued_tokens: float
    rate_tokens_s: float
    cores_busy: float | None = None
    """Share of the cores in use since the last look, where the instances compute on those of this machine."""
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advice:
    role: str
    seen: int
    count: int
    reason: str
    observed: PlaneObservation


@dataclass(frozen=True, slots=True)
class _Asked:
    seen: int
    count: int
    at: float


class Autoscaler:
    """`pools` by role, in the order of preference where they cost the same; none where people decide how many instances
    there are. `of_fleet`: there is no trainer."""

    def __init__(self, pools: Mapping[str, Pool], *, of_fleet: bool = False) -> None:
        self._pools = pools
        settings = in_all(pools) if pools else ElasticSettings(min=0, max=1)
        self._policy = ElasticPolicy(settings, of_fleet=of_fleet)
        self._of_fleet = of_fleet
        self._shortest_s = settings.up_cooldown_s / settings.evidence
        """Shortest observation, such that a cool-down has room for all that it needs."""
        self._first: TrainerStatus | None = None
        self._last: TrainerStatus | None = None
        self._attached_at = 0.0
        self._at = 0.0
        self._idle_s = self._serving_s = self._local_s = 0.0
        self._cores_s = self._cores_busy_s = 0.0
        self._least_queued = math.inf
        self._steps = 0
        self._steps_since: float | None = None
        self._step_at: float | None = None
        self._step_s = 0.0
        self._rates: dict[str, float] = {}
        """Tokens/s of one instance of each pool, when it last generated."""
        self._asked: dict[str, _Asked] = {}
        self._goal: tuple[Scale, PlaneObservation] | None = None
        """What there should be in all, by the last decision."""

    def detached(self) -> None:
        """Drop the present observation, because there is no trainer."""
        self._first = self._last = None
        self._step_at = None

    def pulse(self, pulse: TrainerStatus, now: float) -> None:
        self._last = pulse
        if self._first is None:
            self._attached_at = now
            self._begin(now)

    def step_done(self, now: float) -> None:
        """Note that a step ended: a policy was published."""
        self._steps += 1
        if self._step_at is not None:
            self._step_s = now - self._step_at
        self._step_at = now

    def look(self, fleet: Fleet, now: float, *, window_open: bool = False) -> list[Advice]:
        """The policy's advice, one for each pool that is to change; called every so often. `window_open` says that the
        trainer's devices generate."""
        first, last = self._first, self._last
        if first is None or last is None:
            return []
        passed = now - self._at
        self._at = now
        self._serving_s += fleet.serving * passed
        self._idle_s += max(0, fleet.serving - fleet.busy) * passed
        self._local_s += passed if window_open else 0.0
        if fleet.cores_busy is not None:
            self._cores_s += passed
            self._cores_busy_s += fleet.cores_busy * passed
        self._least_queued = min(self._least_queued, fleet.queued_tokens)
        self._rates.update(fleet.rates)
        wanted = {role: last.wanted.get(role, 0) for role in self._pools}
        urgent = not any(wanted.values()) and not fleet.others and fleet.queued_tokens > 0
        outside = any(
            not pool.elastic.min <= wanted[role] <= pool.elastic.max for role, pool in self._pools.items()
        )
        unanswered = {
            role: asked
            for role, asked in self._asked.items()
            if asked.seen == wanted[role] and now - asked.at < ASK_AGAIN_S
        }
        if not (urgent or outside or unanswered or self._is_whole(last.at_s - first.at_s)):
            return []
        if unanswered:
            if any(now - asked.at < FOLLOW_S for asked in unanswered.values()):
                return []
            return self._to_others(wanted, unanswered, now)
        observation = self._observation(fleet, first, last, wanted)
        if not (urgent or outside):
            self._begin(now)
        scale = self._policy.decide(observation, now)
        if scale is None and outside:
            scale = Scale(sum(wanted.values()), "A pool is outside its bounds.")
        if scale is None:
            return []
        self._goal = scale, observation
        if scale.target == sum(wanted.values()) and not outside:  # said for the journal alone
            role = next(iter(self._pools))
            return [Advice(role, wanted[role], wanted[role], scale.reason, observation)]
        return self._advices(wanted, (), now)

    def _to_others(self, wanted: dict[str, int], full: Collection[str], now: float) -> list[Advice]:
        """The pools that were asked to grow did not: there is no room in them. Ask others for what still lacks."""
        if self._goal is None or sum(wanted.values()) >= self._goal[0].target:
            return []
        return self._advices(wanted, full, now)

    def _advices(self, wanted: dict[str, int], full: Collection[str], now: float) -> list[Advice]:
        assert self._goal is not None
        scale, observation = self._goal
        found = share_out(scale.target, wanted, self._pools, self._rates, full)
        made = [
            Advice(role, wanted[role], count, scale.reason, observation)
            for role, count in found.items()
            if count != wanted[role]
        ]
        self._asked.update({one.role: _Asked(one.seen, one.count, now) for one in made})
        return made

    def _begin(self, now: float) -> None:
        self._first, self._at = self._last, now
        self._steps, self._steps_since = 0, self._step_at
        self._idle_s = self._serving_s = self._local_s = self._cores_s = self._cores_busy_s = 0.0
        self._least_queued = math.inf

    def _is_whole(self, observed_s: float) -> bool:
        if observed_s < self._shortest_s or observed_s <= 0:
            return False
        return self._steps > 0 or observed_s >= max(NO_STEP_S, 2.0 * self._step_s)

    def _knows_steps(self) -> bool:
        """Whether idle instances can be told from those that wait for the trainer's turn to end."""
        return self._of_fleet or self._step_s > 0 or self._at - self._attached_at >= FIRST_STEPS_WITHIN_S

    def _observation(
        self, fleet: Fleet, first: TrainerStatus, last: TrainerStatus, wanted: Mapping[str, int]
    ) -> PlaneObservation:
        observed_s = max(last.at_s - first.at_s, 1e-9)
        local = min(1.0, self._local_s / observed_s)
        waited = min(1.0, (last.waited_s - first.waited_s) / observed_s)
        return PlaneObservation(
            instances=sum(wanted.values()),
            starting=sum(max(0, count - fleet.placed.get(role, 0)) for role, count in wanted.items()),
            others=fleet.others,
            trainer_wait_share=round(max(0.0, waited - local), 4),
            local_share=round(local, 4),
            idle_share=round(self._idle_share(), 4),
            queued_tokens=round(fleet.queued_tokens, 1),
            least_queued_tokens=round(self._least_queued, 1),
            rate_tokens_s=round(fleet.rate_tokens_s, 1),
            step_s=round(self._mean_step_s(), 4),
            cores_busy=round(self._cores_busy_s / self._cores_s, 4) if self._cores_s > 0 else None,
        )

    def _idle_share(self) -> float:
        return self._idle_s / self._serving_s if self._serving_s > 0 and self._knows_steps() else 0.0

    def _mean_step_s(self) -> float:
        """From the end of the last step before the observation to the end of its last one."""
        if not self._steps or self._step_at is None or self._steps_since is None:
            return 0.0
        return (self._step_at - self._steps_since) / self._steps
