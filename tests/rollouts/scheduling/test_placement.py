"""*one place*: whatever happens to samples and instances, queue and load say the same as the placement."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.placement import Placement
from tests.examples import examples

NAMES = st.sampled_from(["a", "b", "c"])
KEYS = st.integers(0, 11)
LIMIT = 1000


class Places(RuleBasedStateMachine):
    """`where` is a model of the placement: each sample's holder and destination; None for one that is queued, absent
    for one that is nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement()
        self.samples = {key: PlacedSample(key, key // 3, 10 * (key // 3), LIMIT) for key in range(12)}
        self.where: dict[int, tuple[str, str | None] | None] = {}

    def some(self, key: int) -> PlacedSample:
        return self.samples[key]

    def instance(self, name: str) -> Instance:
        return self.placement.instances[name]

    @rule(name=NAMES, slots=st.integers(1, 4))
    def join(self, name: str, slots: int) -> None:
        if name not in self.placement.instances:
            self.placement.join(name, max_running=slots, kv_tokens=4000)

    @rule(name=NAMES, slots=st.integers(1, 6), kv_tokens=st.integers(1, 8000))
    def resize(self, name: str, slots: int, kv_tokens: int) -> None:
        if name in self.placement.instances:
            self.placement.resize(self.instance(name), max_running=slots, kv_tokens=kv_tokens)
            assert self.instance(name).slots >= slots
            assert self.instance(name) in self.placement.load.changed, "the next decision looks at it again"

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if name not in self.placement.instances:
            return
        orphans = self.placement.leave(self.instance(name))
        held = [key for key, place in self.where.items() if place is not None and place[0] == name]
        assert sorted(sample.key for sample in orphans) == sorted(held)
        for key in held:
            del self.where[key]
        for key, place in self.where.items():
            if place is not None and place[1] == name:
                self.where[key] = (place[0], None)
                assert self.some(key).recalled

    @rule(key=KEYS, done=st.integers(0, LIMIT))
    def enqueue(self, key: int, done: int) -> None:
        self.placement.enqueue(self.some(key), done)
        self.where[key] = None

    @rule(key=KEYS)
    def take_away(self, key: int) -> None:
        self.placement.take_away(self.some(key))
        self.where.pop(key, None)

    @rule(key=KEYS, length=st.integers(1, LIMIT))
    def finish(self, key: int, length: int) -> None:
        self.placement.finish(self.some(key), length)
        self.where.pop(key, None)

    @precondition(lambda self: self.placement.instances and None in self.where.values())
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key, place in self.where.items() if place is None]))
        name = data.draw(st.sampled_from(sorted(self.placement.instances)))
        self.placement.assign(self.some(key), self.instance(name))
        self.where[key] = (name, None)

    @precondition(lambda self: self.placement.instances)
    @rule(key=KEYS, data=st.data(), done=st.integers(0, LIMIT))
    def place(self, key: int, data: st.DataObject, done: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.placement.instances)))
        self.placement.place(self.some(key), self.instance(name), done)
        self.where[key] = (name, None)

    @precondition(lambda self: len(self.placement.instances) > 1 and any(self.where.values()))
    @rule(data=st.data())
    def migrate(self, data: st.DataObject) -> None:
        key, place = data.draw(st.sampled_from([(k, p) for k, p in self.where.items() if p is not None]))
        others = sorted(set(self.placement.instances) - set(place))
        if others:
            name = data.draw(st.sampled_from(others))
            self.placement.migrate(self.some(key), self.instance(name), 0.0)
            self.where[key] = (place[0], name)

    @precondition(lambda self: any(self.where.values()))
    @rule(data=st.data())
    def try_alone(self, data: st.DataObject) -> None:
        key, place = data.draw(st.sampled_from([(k, p) for k, p in self.where.items() if p is not None]))
        self.placement.try_alone(self.instance(place[0]), self.some(key))

    @rule(name=NAMES, admitted=st.booleans(), tokens=st.integers(0, 500), rate=st.floats(0, 100))
    def report(self, name: str, admitted: bool, tokens: int, rate: float) -> None:
        if name in self.placement.instances:
            load, instance = self.placement.load, self.instance(name)
            self.placement.admit(instance, admitted)
            load.generated(instance, tokens)
            load.observe(instance, rate_tokens_s=rate, running=instance.running, kv_used_tokens=0)
            load.predict_again()

    @invariant()
    def everybody_says_the_same(self) -> None:
        for key, sample in self.samples.items():
            place = self.where.get(key)
            holder, destination = place if place is not None else (None, None)
            assert (sample.holder.name if sample.holder else None) == holder
            assert (sample.destination.name if sample.destination else None) == destination
            assert (sample.queue_key is not None) == (place is None and key in self.where)
            assert sample.recalled or destination is None
            assert holder is not None or (not sample.recalled and sample.counted_at is None)
        queued = [key for key, place in self.where.items() if place is None]
        assert len(self.placement.queue) == len(queued)
        first = self.placement.queue.first(-1)
        assert (first.key if first is not None else None) == min(
            queued, key=lambda key: self.some(key).queue_key or (), default=None
        )
        for name, instance in self.placement.instances.items():
            assert sorted(instance.held) == sorted(k for k, p in self.where.items() if p and p[0] == name)
            assert sorted(instance.counted) == sorted(
                key for key, place in self.where.items() if place and (place[1] or place[0]) == name
            )
            assert instance.on_trial is None or instance.on_trial.key in instance.held

    @invariant()
    def sums_are_those_of_the_samples(self) -> None:
        for instance in self.placement.instances.values():
            counted = instance.counted.values()
            prompts = {sample.group: sample.prompt_tokens for sample in counted}
            reserved = sum(sample.kv_tokens for sample in counted) + sum(prompts.values())
            assert math.isclose(instance.kv_reserved, reserved, abs_tol=1e-3)
            assert math.isclose(instance.promised, sum(s.expected for s in counted), abs_tol=1e-3)
        accepting = [one.rate_tokens_s for one in self.placement.instances.values() if one.accepting]
        assert math.isclose(self.placement.load.rate_tokens_s, sum(accepting), abs_tol=1e-3)
        expected = sum(self.some(key).expected for key, place in self.where.items() if place is None)
        assert math.isclose(self.placement.queue.tokens, expected, abs_tol=1e-3)
        groups = {self.some(key).group for key in self.where}
        assert set(self.placement.queue.groups) == groups


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
