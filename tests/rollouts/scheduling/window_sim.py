"""A step loop in which local and remote engines generate and the trainer trains, tick by tick.

Engines have slots, a sample in a slot grows by `SPEED` tokens/s, and the trainer trains finished samples in order.
Beside the planner there are two to compare it with: the best fixed window of each step, found by trying, and the
ancestor's rule (balance.rs of RLBoost, as told in its authors' code at 836120a).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.scheduling.device_windows import Smoothed, TrainTime, Window, WindowState, plan_window
from gyre.rollouts.scheduling.lengths import LengthModel

TICK_S = 2.0
SPEED = 50.0
LOCAL_SLOTS = 64
REMOTE_SLOTS = 24
SAMPLES = 192
LIMIT = 12_000
TRAIN_TOKENS_S = 9000.0
SWITCH_S = 6.0
LOST_S = 5000.0
"""A step that takes longer is given up: nobody generates any more."""

Fleet = Callable[[float], int]
"""How many remote instances there are, so many seconds into the step."""


@dataclass
class Step:
    duration_s: float = 0.0
    trainer_idle_s: float = 0.0
    remote_idle_s: float = 0.0
    generated_s: float = 0.0
    """When the last sample was done."""
    opened: int = 0
    """How often local engines were opened."""
    ends_s: list[float] = field(default_factory=list)
    """What was planned, tick by tick."""

    @property
    def idle_s(self) -> float:
        return self.trainer_idle_s + self.remote_idle_s


class Policy(Protocol):
    def generates(self, view: View) -> bool: ...

    def stepped(self, step: Step, remotes: int) -> None: ...


@dataclass
class View:
    now_s: float
    remotes: int
    generating: bool
    done: NDArray[np.float64]
    """Of unfinished samples."""
    untrained_tokens: float
    noise: float


def lengths_of_step(index: int) -> NDArray[np.float64]:
    random_ = np.random.default_rng(index)
    return np.minimum(random_.lognormal(8.0, 0.6, SAMPLES), LIMIT).astype(int).astype(float)


def run_step(
    policy: Policy, lengths: NDArray[np.float64], fleet: Fleet, noise: float = 0.0, seed: int = 0
) -> Step:
    random_ = random.Random(seed)
    left, where = lengths.copy(), np.zeros(len(lengths), dtype=int)  # 0 queued, 1 local, 2 remote, 3 done
    step, now, ready, trained = Step(), 0.0, 0.0, 0.0
    generating, switching_s = True, 0.0
    while trained < lengths.sum() - 1e-6 and now < LOST_S:
        remotes = fleet(now)
        unfinished = where < 3
        view = View(
            now,
            remotes,
            generating,
            (lengths - left)[unfinished],
            float(lengths.sum() - trained),
            1.0 + noise * (1 if random_.random() < 0.5 else -1),
        )
        wanted = policy.generates(view)
        if wanted != generating:
            generating, switching_s = wanted, SWITCH_S
            step.opened += wanted
        for place, slots in (
            (1, LOCAL_SLOTS if generating and not switching_s else 0),
            (2, remotes * REMOTE_SLOTS),
        ):
            there = np.flatnonzero(where == place)
            where[there[slots:]] = 0
            free = slots - len(there)
            if free > 0:
                where[np.flatnonzero(where == 0)[:free]] = place
        running = (where == 1) | (where == 2)
        left[running] -= SPEED * TICK_S
        ended = running & (left <= 0)
        ready += float(lengths[ended].sum())
        where[ended], left[ended] = 3, 0.0
        if ended.any():
            step.generated_s = now + TICK_S
        if not (where < 3).any() and remotes:
            step.remote_idle_s += TICK_S
        if switching_s > 0:
            switching_s = max(switching_s - TICK_S, 0.0)
        elif not generating:
            work = min(ready, TRAIN_TOKENS_S * TICK_S)
            ready -= work
            trained += work
            step.trainer_idle_s += TICK_S - work / TRAIN_TOKENS_S
        now += TICK_S
    step.duration_s = now
    policy.stepped(step, fleet(now))
    return step


class Planned:
    """The planner, fed with noisy measurements."""

    def __init__(self) -> None:
        self.lengths, self.train_time = LengthModel(), TrainTime()
        self.local, self.remote = Smoothed(20.0), Smoothed(20.0)
        self.planned: Window | None = None
        self.plans: list[Window] = []
        self.clock_s = 0.0

    def generates(self, view: View) -> bool:
        self.clock_s += TICK_S
        seen = self.lengths.outlook((int(done), LIMIT) for done in view.done)
        self.local.observe(LOCAL_SLOTS * SPEED * view.noise, self.clock_s)
        self.remote.observe(REMOTE_SLOTS * SPEED * view.noise, self.clock_s)
        self.planned = plan_window(
            WindowState(
                now_s=view.now_s,
                tokens_left=seen.tokens_left,
                samples_left=seen.samples_left,
                longest_left_tokens=seen.longest_left_tokens,
                sample_tokens_s=SPEED,
                local_tokens_s=self.local.value,
                remote_tokens_s=self.remote.value * view.remotes,
                train_s=self.train_time.predict_s(view.untrained_tokens),
                switch_s=SWITCH_S,
                generating=view.generating,
                planned_until_s=self.planned.until_s if self.planned is not None else None,
            )
        )
        self.plans.append(self.planned)
        return self.planned.is_open(view.now_s)

    def stepped(self, step: Step, remotes: int) -> None:
        self.planned = None

    def learn(self, lengths: NDArray[np.float64]) -> None:
        for length in lengths:
            self.lengths.observe(int(length))
        self.train_time.observe(int(lengths.sum()), lengths.sum() / TRAIN_TOKENS_S)


class Fixed:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s

    def generates(self, view: View) -> bool:
        return view.now_s < self.window_s

    def stepped(self, step: Step, remotes: int) -> None: ...


class Ancestor(Fixed):
    """A fixed sleep per step, corrected afterwards. Its table of windows tuned for one model starts empty here."""

    def __init__(self) -> None:
        super().__init__(150.0)
        self.table: dict[int, float] = {}
        self.count, self.last_throughput, self.peak = 0, 0.0, 0.0

    def stepped(self, step: Step, remotes: int) -> None:
        throughput = 1e6 / step.duration_s
        if remotes != self.count:
            self.table[self.count] = 0.8 * self.table.get(self.count, self.peak) + 0.2 * self.peak
            self.count, self.last_throughput = remotes, 0.0
            if remotes in self.table:
                self.window_s = self.peak = self.table[remotes]
                return
        elif throughput <= self.last_throughput:
            self.table[remotes] = 0.2 * self.table.get(remotes, self.peak) + 0.8 * self.peak
        else:
            self.peak = self.window_s
        self.last_throughput = throughput
        if step.trainer_idle_s < step.remote_idle_s:
            self.window_s = max(5.0, self.window_s - (step.remote_idle_s - step.trainer_idle_s) / 3)
        else:
            self.window_s += (step.trainer_idle_s - step.remote_idle_s) / 3


def oracle(lengths: NDArray[np.float64], fleet: Fleet, tries: int = 14) -> Step:
    """The best of fixed windows up to twice the time that local engines alone would need."""
    longest_s = 2 * lengths.sum() / (LOCAL_SLOTS * SPEED)
    steps = [run_step(Fixed(longest_s * index / (tries - 1)), lengths, fleet) for index in range(tries)]
    return min(steps, key=lambda step: step.duration_s)
