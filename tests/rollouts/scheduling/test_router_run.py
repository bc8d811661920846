"""A whole batch through a fleet that changes: the router's decisions, taken together, are good ones."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from gyre.rollouts.scheduling.lengths import LengthModel
from tests.rollouts.scheduling.routed_fleet import RoutedFleet

TICK_S = 2.0
LIMIT = 12_000
SLOTS = 16


@dataclass
class Engine:
    speed: float
    """Tokens/s of each of its samples."""
    done: dict[int, int] = field(default_factory=dict)
    prefills: set[int] = field(default_factory=set)
    """Groups whose prompt it read."""


@dataclass
class Run:
    """`changes`: at which second which engine comes with which speed, leaves (0), or changes its speed."""

    lengths: list[int]
    changes: list[tuple[float, str, float]]
    moves: bool = True
    group_size: int = 8
    prompt_tokens: int = 400
    now: float = 0.0
    moved: int = 0
    prefilled: int = 0
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.router = RoutedFleet(LengthModel())
        self.engines: dict[str, Engine] = {}
        for sample in range(len(self.lengths)):
            self.submit(sample, 0)

    def submit(self, sample: int, done: int) -> None:
        self.router.submit(
            sample,
            group=sample // self.group_size,
            prompt_tokens=self.prompt_tokens,
            done_tokens=done,
            max_new_tokens=LIMIT,
        )

    def give(self, sample: int, name: str, done: int) -> None:
        engine, group = self.engines[name], sample // self.group_size
        engine.done[sample] = done
        self.prefilled += group not in engine.prefills
        engine.prefills.add(group)

    def change(self, name: str, speed: float) -> None:
        if speed and name in self.engines:
            self.engines[name].speed = speed
        elif speed:
            self.engines[name] = Engine(speed)
            self.router.join(name, max_running=SLOTS, kv_tokens=10**6)
        else:
            engine = self.engines.pop(name)
            assert sorted(self.router.leave(name)) == sorted(engine.done)
            for sample, done in engine.done.items():
                self.submit(sample, done)

    def tick(self) -> None:
        while self.changes and self.changes[0][0] <= self.now:
            _, name, speed = self.changes.pop(0)
            self.change(name, speed)
        done_before = {
            sample: done for engine in self.engines.values() for sample, done in engine.done.items()
        }
        for sample, name in self.router.assign():
            self.give(sample, name, self.resumed(sample))
        if self.moves:
            for sample, source, target in [
                *self.router.rebalance(self.now),
                *self.router.stragglers(self.now),
            ]:
                self.moved += 1
                self.give(sample, target, self.engines[source].done.pop(sample, done_before.get(sample, 0)))
        for name, engine in self.engines.items():
            grown = int(engine.speed * TICK_S)
            running = list(engine.done)[:SLOTS]
            self.router.generated(name, grown * len(running))
            self.router.observe(name, rate_tokens_s=engine.speed * len(running), kv_used_tokens=0)
            for sample in running:
                engine.done[sample] += grown
                if engine.done[sample] >= self.lengths[sample]:
                    del engine.done[sample]
                    assert sample not in self.finished
                    self.finished.add(sample)
                    self.router.finished(sample, self.lengths[sample])
        self.now += TICK_S

    def resumed(self, sample: int) -> int:
        return int(self.router.samples[sample].done_tokens)

    def to_the_end(self) -> float:
        while len(self.finished) < len(self.lengths):
            self.tick()
            assert self.now < 5000, "it does not end"
        return self.now


def drawn(count: int) -> list[int]:
    random_ = random.Random(11)
    return [min(int(random_.lognormvariate(math.log(2500), 0.6)), LIMIT) for _ in range(count)]


def fleet(*speeds: float) -> list[tuple[float, str, float]]:
    return [(0.0, f"i{index}", speed) for index, speed in enumerate(speeds)]


def test_a_batch_takes_hardly_longer_than_it_must_on_unlike_instances() -> None:
    lengths = drawn(512)
    speeds = (60, 60, 60, 60, 30, 30)
    ideal_s = sum(lengths) / (SLOTS * sum(speeds)) + max(lengths) / max(speeds) / 2
    assert Run(lengths, fleet(*speeds)).to_the_end() < 1.25 * ideal_s


def prompts_read(prompt_tokens: int) -> float:
    run = Run(drawn(768), fleet(*[60] * 6), prompt_tokens=prompt_tokens)
    run.to_the_end()
    return run.prefilled / (768 / run.group_size)


def test_a_long_prompt_of_a_group_of_8_is_read_about_once_and_a_short_one_need_not_be() -> None:
    assert prompts_read(4000) < 1.6
    assert prompts_read(50) > 2.5


def test_when_half_the_fleet_is_lost_and_new_instances_come_nothing_is_lost_and_moves_pay() -> None:
    lengths = drawn(160)
    changes = [*fleet(60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60)]
    changes += [(20.0, f"i{index}", 0.0) for index in range(5)]
    changes += [(40.0, f"n{index}", 60.0) for index in range(5)]
    with_moves, without = Run(lengths, changes.copy()), Run(lengths, changes.copy(), moves=False)
    assert with_moves.to_the_end() <= without.to_the_end()
    assert with_moves.finished == set(range(160))


def test_an_instance_that_becomes_slow_is_relieved_of_its_samples() -> None:
    changes = [*fleet(60, 60, 60), (30.0, "i0", 6.0)]
    lengths = drawn(48)
    with_moves, without = Run(lengths, changes.copy()), Run(lengths, changes.copy(), moves=False)
    assert with_moves.to_the_end() < 0.5 * without.to_the_end()
    assert with_moves.moved <= 2 * 48
