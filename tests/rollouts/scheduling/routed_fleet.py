"""A placement with its router and its rebalancing, told of and asked about by names and numbers.

`lines` counts the lines of scheduling code that run, so that tests of how cost grows do not depend on time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from gyre.rollouts import scheduling
from gyre.rollouts.scheduling.fleet import PlacedSample, Prefix
from gyre.rollouts.scheduling.lengths import LengthModel
from gyre.rollouts.scheduling.placement import Placement
from gyre.rollouts.scheduling.rebalancing import Move, Rebalancing
from gyre.rollouts.scheduling.router import OpenInstances, Router
from gyre.rollouts.scheduling.routing_settings import RoutingSettings

_FOLDER = str(Path(scheduling.__file__).parent)


class Given(NamedTuple):
    sample: int
    instance: str


class Moved(NamedTuple):
    sample: int
    source: str
    target: str


class RoutedFleet:
    def __init__(self, lengths: LengthModel | None = None, settings: RoutingSettings | None = None) -> None:
        self.placement = Placement(lengths, settings)
        self.instances = self.placement.instances
        self.queue = self.placement.queue
        self.settings = self.placement.settings
        self.samples: dict[int, PlacedSample] = {}
        """Those that are queued or at an instance."""
        self.open = OpenInstances(self.placement)
        self.router = Router(self.placement, self.open)
        self.rebalancing = Rebalancing(self.placement, self.open, self.router)

    # -- instances ----------------------------------------------------------------------------------

    def join(
        self, name: str, *, max_running: int, kv_tokens: int, rate_tokens_s: float | None = None
    ) -> None:
        self.placement.join(name, max_running=max_running, kv_tokens=kv_tokens, rate_tokens_s=rate_tokens_s)

    def leave(self, name: str) -> list[int]:
        if name not in self.instances:
            return []
        left = [sample.key for sample in self.placement.leave(self.instances[name])]
        for key in left:
            del self.samples[key]
        return left

    def admit(self, name: str, admitted: bool) -> None:
        self.placement.admit(self.instances[name], admitted)

    def serve(self, name: str, version: int) -> None:
        self.placement.serve(self.instances[name], version)

    def observe(self, name: str, *, rate_tokens_s: float, kv_used_tokens: int) -> None:
        """A new measurement: no two come out alike."""
        instance = self.instances[name]
        if rate_tokens_s == instance.told_tokens_s:
            rate_tokens_s *= 1 + 1e-12
        self.placement.load.observe(
            instance, rate_tokens_s=rate_tokens_s, running=instance.running, kv_used_tokens=kv_used_tokens
        )

    def generated(self, name: str, tokens: int) -> None:
        self.placement.load.generated(self.instances[name], tokens)

    # -- samples ------------------------------------------------------------------------------------

    def submit(
        self,
        key: int,
        *,
        group: int,
        prompt_tokens: int,
        done_tokens: int,
        max_new_tokens: int,
        min_version: int = -1,
        order: tuple[int, int] | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        sample = self.samples[key] = PlacedSample(key, group, prompt_tokens, max_new_tokens, min_version)
        sample.order, sample.prefix = order, prefix
        self.placement.enqueue(sample, done_tokens)

    def finished(self, key: int, length: int) -> None:
        self.placement.finish(self.samples.pop(key), length)

    def withdraw(self, key: int) -> None:
        self.placement.take_away(self.samples.pop(key))

    def place(self, key: int, name: str, done_tokens: int = 0) -> None:
        self.placement.place(self.samples[key], self.instances[name], done_tokens)

    # -- decisions ----------------------------------------------------------------------------------

    def assign(self, limit: int | None = None) -> list[Given]:
        return [Given(sample.key, instance.name) for sample, instance in self.router.assign(limit)]

    def deal(self, now: float) -> list[Moved]:
        return self._moved(self.rebalancing.deal(now))

    def rebalance(self, now: float) -> list[Moved]:
        """As if every instance handed its samples back at once."""
        return self._moved(self.rebalancing.even_out(now))

    def stragglers(self, now: float) -> list[Moved]:
        return self._moved(self.rebalancing.relieve_stragglers(now))

    def _moved(self, moves: list[Move]) -> list[Moved]:
        for sample, _, target in moves:
            moved_at = sample.moved_at
            self.placement.place(sample, target, int(target.done_tokens(sample)))
            sample.moved_at = moved_at
        return [Moved(sample.key, source.name, target.name) for sample, source, target in moves]

    # -- reading ------------------------------------------------------------------------------------

    def held_by(self, name: str) -> list[int]:
        return list(self.instances[name].held) if name in self.instances else []

    def instance_of(self, key: int) -> str | None:
        sample = self.samples.get(key)
        return sample.holder.name if sample is not None and sample.holder is not None else None

    def queued(self) -> int:
        return len(self.queue)

    def outstanding_tokens(self, name: str) -> float:
        return self.instances[name].outstanding_tokens

    def drain_s(self, name: str) -> float:
        return self.placement.load.left_s(self.instances[name])

    def rate_tokens_s(self, name: str) -> float:
        return self.instances[name].rate_tokens_s

    def has_room(self, name: str) -> bool:
        return self.instances[name].has_room


class Lines:
    count = 0


@contextmanager
def lines() -> Iterator[Lines]:
    counted = Lines()

    def in_function(frame: FrameType, event: str, argument: Any) -> Any:
        counted.count += event == "line"
        return in_function

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        return in_function if frame.f_code.co_filename.startswith(_FOLDER) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield counted
    finally:
        sys.settrace(before)
