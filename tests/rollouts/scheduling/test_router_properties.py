"""The router's invariants, whatever instances and samples do: they come, leave, stall, die and are told of twice."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gyre.rollouts.scheduling.routing_settings import RoutingSettings
from tests.examples import examples
from tests.rollouts.machine.fleet import went_through
from tests.rollouts.scheduling.routed_fleet import Moved, RoutedFleet

NAMES = st.sampled_from(["a", "b", "c", "d"])
SAMPLES = st.integers(0, 40)
LIMIT = 1000


def wish(sample: int) -> int:
    """The oldest policy version that the sample accepts; of most any."""
    return max(-1, sample // 4 % 5 - 3)


class Fleet(RuleBasedStateMachine):
    """A model of who must have what, beside the router."""

    @initialize(overcommit=st.sampled_from([0.0, 0.06, 0.5]), cooldown_s=st.sampled_from([0.0, 20.0]))
    def start(self, overcommit: float, cooldown_s: float) -> None:
        self.settings = RoutingSettings(
            overcommit=overcommit, move_cooldown_s=cooldown_s, move_gain_s=0.5, moves_burst=3, moves_per_s=1
        )
        self.router = RoutedFleet(settings=self.settings)
        self.now = 0.0
        self.instances: dict[str, int] = {}
        self.accepting: set[str] = set()
        self.version: dict[str, int] = {}
        self.place: dict[int, str | None] = {}
        self.moves: Counter[int] = Counter()
        self.moved_at: dict[int, float] = {}
        self.kept: dict[str, int] = {}
        """How many each instance has brought along, which may be more than it has room for."""

    # -- the world ------------------------------------------------------------------------------

    @rule(
        name=NAMES, slots=st.integers(1, 6), kv=st.integers(1, 9000), rate=st.sampled_from([None, 1.0, 90.0])
    )
    def join(self, name: str, slots: int, kv: int, rate: float | None) -> None:
        if name in self.instances:
            return
        self.router.join(name, max_running=slots, kv_tokens=kv, rate_tokens_s=rate)
        self.instances[name] = slots + (math.ceil(slots * self.settings.overcommit))
        self.accepting.add(name)
        self.version[name] = -1

    @rule(name=NAMES, newer=st.integers(1, 2))
    def load(self, name: str, newer: int) -> None:
        if name in self.instances:
            self.version[name] += newer
            self.router.serve(name, self.version[name])

    @rule(name=NAMES, resubmit=st.booleans(), done=st.integers(0, LIMIT))
    def leave(self, name: str, resubmit: bool, done: int) -> None:
        lost = self.router.leave(name)
        assert sorted(lost) == sorted(sample for sample, place in self.place.items() if place == name)
        self.instances.pop(name, None)
        self.kept.pop(name, None)
        self.accepting.discard(name)
        for sample in lost:
            del self.place[sample]
            if resubmit:
                self.submit(sample, done)

    @rule(name=NAMES, accepting=st.booleans())
    def accept(self, name: str, accepting: bool) -> None:
        if name in self.instances:
            self.router.admit(name, accepting)
            (self.accepting.add if accepting else self.accepting.discard)(name)

    @rule(name=NAMES, rate=st.floats(0, 500), kv=st.integers(0, 9000))
    def observe(self, name: str, rate: float, kv: int) -> None:
        if name in self.instances:
            self.router.observe(name, rate_tokens_s=rate, kv_used_tokens=kv)

    @rule(name=NAMES, tokens=st.integers(0, 3000))
    def generated(self, name: str, tokens: int) -> None:
        if name in self.instances:
            self.router.generated(name, tokens)

    @rule(sample=SAMPLES, done=st.sampled_from([0, 0, 1, 700, LIMIT]))
    def submit(self, sample: int, done: int) -> None:
        if sample not in self.place:
            self.router.submit(
                sample,
                group=sample // 4,
                prompt_tokens=sample * 7,
                done_tokens=done,
                max_new_tokens=LIMIT,
                min_version=wish(sample),
            )
            self.place[sample] = None
            self.moves[sample], self.moved_at[sample] = 0, -math.inf

    @rule(sample=SAMPLES, length=st.integers(0, LIMIT))
    def finish(self, sample: int, length: int) -> None:
        if sample in self.place:
            self.router.finished(sample, length)
            del self.place[sample]

    @rule(sample=SAMPLES)
    def withdraw(self, sample: int) -> None:
        if sample in self.place:
            self.router.withdraw(sample)
            del self.place[sample]

    @rule(sample=SAMPLES, name=NAMES)
    def keep(self, sample: int, name: str) -> None:
        """An instance is back that has the sample still."""
        if name in self.instances and self.place.get(sample, name) is None:
            self.router.place(sample, name)
            self.place[sample] = name
            self.kept[name] = self.kept.get(name, 0) + 1

    # -- the decisions --------------------------------------------------------------------------

    @rule(limit=st.sampled_from([None, 0, 1, 5]))
    def assign(self, limit: int | None) -> None:
        given_ = self.router.assign(limit)
        assert limit is None or len(given_) <= limit
        for sample, name in given_:
            assert sum(place == name for place in self.place.values()) < self.instances[name]
            assert self.place[sample] is None
            assert name in self.accepting
            assert self.version[name] >= wish(sample), "old weights serve as new"
            self.place[sample] = name
            SEEN["given out"] += 1
        if limit is None and self.router.queued():
            SEEN["no room"] += bool(self.accepting)
            for sample, place in self.place.items():
                if place is None:
                    able = [name for name in self.accepting if self.version[name] >= wish(sample)]
                    SEEN["too old"] += len(able) < len(self.accepting)
                    assert not any(map(self.router.has_room, able)), "it stands behind another one's wish"

    @rule(passed_s=st.sampled_from([0.0, 1.0, 30.0]), tail=st.booleans())
    def move(self, passed_s: float, tail: bool) -> None:
        self.now += passed_s
        moves = self.router.stragglers(self.now) if tail else self.router.rebalance(self.now)
        assert not tail or len(moves) <= self.settings.moves_burst
        self.check(moves)
        SEEN["stragglers moved" if tail else "moved"] += len(moves)

    @rule(passed_s=st.sampled_from([0.0, 0.04, 1.0, 30.0]))
    def turn(self, passed_s: float) -> None:
        """What the manager does at every turn of its loop that brings something."""
        self.now += passed_s
        self.assign(None)
        moves = self.router.deal(self.now)
        self.check(moves)
        SEEN["dealt"] += len(moves)
        free = [one for one in self.router.instances.values() if one.has_free_slot]
        for instance in self.router.instances.values():
            for sample in list(instance.counted.values())[instance.max_running :]:
                SEEN["beyond"] += 1
                able = [one.name for one in free if one.version >= wish(sample.key)]
                SEEN["beyond, and used up"] += bool(able)
                assert not able or self.rests(sample.key), "it waits beside a free slot"

    def rests(self, sample: int) -> bool:
        return (
            self.moves[sample] >= self.settings.cheap_moves
            and self.now - self.moved_at[sample] < self.settings.move_cooldown_s
        )

    def check(self, moves: list[Moved]) -> None:
        for sample, source, target in moves:
            assert self.place[sample] == source != target
            assert target in self.accepting
            assert self.version[target] >= wish(sample), "old weights serve as new"
            running = sum(place == target for place in self.place.values())
            assert running < self.router.instances[target].max_running, "it waits there too"
            assert not self.rests(sample), "it moves too often"
            self.place[sample] = target
            self.moves[sample] += 1
            self.moved_at[sample] = self.now

    # Rules are drawn alike, and each alone seldom comes to a fleet that has work, or too much of it.
    @rule(name=NAMES, slots=st.integers(1, 6), first=SAMPLES, count=st.integers(1, 12))
    def work_comes(self, name: str, slots: int, first: int, count: int) -> None:
        self.join(name, slots, 9000, 90.0)
        for sample in range(first, first + count):
            self.submit(sample, 0)
        self.assign(None)

    @rule(name=NAMES, tail=st.sampled_from([None, None, True, False]))
    def somebody_comes_to_a_full_fleet(self, name: str, tail: bool | None) -> None:
        self.leave(name, True, 0)
        for other in {"a", "b", "c", "d"} - {name}:
            self.join(other, 6, 9000, 1.0)
        self.work_comes(name, 6, 0, 40)
        self.leave(name, False, 0)
        self.join(name, 6, 9000, 90.0)
        if tail is None:
            self.turn(0.04)
        else:
            self.move(30.0, tail)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def everything_is_in_one_place(self) -> None:
        if not hasattr(self, "router"):
            return
        assert self.router.queued() == sum(place is None for place in self.place.values())
        for sample, place in self.place.items():
            assert self.router.instance_of(sample) == place
        for name, slots in self.instances.items():
            held = self.router.held_by(name)
            assert sorted(held) == sorted(sample for sample, place in self.place.items() if place == name)
            assert len(held) <= slots + self.kept.get(name, 0)
            outstanding = self.router.outstanding_tokens(name)
            assert math.isfinite(outstanding)
            assert outstanding >= len(held)
            assert self.router.rate_tokens_s(name) > 0


SEEN: Counter[str] = Counter()
"""What the runs went through."""


class TestFleet(Fleet.TestCase):
    settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)

    @classmethod
    def setUpClass(cls) -> None:
        SEEN.clear()

    @classmethod
    def tearDownClass(cls) -> None:
        went_through(SEEN, ("given out", "no room", "too old", "moved", "dealt", "beyond"))


@settings(max_examples=examples(40), deadline=None)
@given(
    rates=st.lists(st.floats(10, 1000), min_size=2, max_size=12),
    samples=st.integers(1, 150),
    group_size=st.sampled_from([1, 4, 8]),
    prompt=st.integers(0, 5000),
)
def test_drain_times_differ_by_no_more_than_a_sample_and_the_prefill_it_saves(
    rates: list[float], samples: int, group_size: int, prompt: int
) -> None:
    router = RoutedFleet()
    for index, rate in enumerate(rates):
        router.join(f"i{index}", max_running=1000, kv_tokens=10**9, rate_tokens_s=rate)
    for sample in range(samples):
        router.submit(
            sample, group=sample // group_size, prompt_tokens=prompt, done_tokens=0, max_new_tokens=LIMIT
        )
    router.assign()
    drains = [router.drain_s(f"i{index}") for index in range(len(rates))]
    sample_s, saved_s = LIMIT / 2 / min(rates), prompt * router.settings.prefill_cost / min(rates)
    # While samples queue behind, as much again as all of them take on the fleet.
    backlog_s = samples * LIMIT / 2 / sum(rates) if prompt and group_size > 1 else 0.0
    assert max(drains) - min(drains) <= sample_s + saved_s + backlog_s + 1e-6


@settings(max_examples=examples(40), deadline=None)
@given(rates=st.lists(st.floats(10, 1000), min_size=2, max_size=8), samples=st.integers(1, 100))
def test_rebalancing_shortens_the_longest_queue_and_settles(rates: list[float], samples: int) -> None:
    router = RoutedFleet(settings=RoutingSettings(move_cooldown_s=0, moves_burst=10**6))
    router.join("i0", max_running=1000, kv_tokens=10**9, rate_tokens_s=rates[0])
    for sample in range(samples):
        router.submit(sample, group=sample, prompt_tokens=50, done_tokens=0, max_new_tokens=LIMIT)
    router.assign()
    for index, rate in enumerate(rates[1:], start=1):
        router.join(f"i{index}", max_running=1000, kv_tokens=10**9, rate_tokens_s=rate)
    longest = router.drain_s("i0")
    for _ in range(20):
        moves = router.rebalance(0.0)
        now_longest = max(router.drain_s(f"i{index}") for index in range(len(rates)))
        assert now_longest <= longest + 1e-6
        longest = now_longest
        if not moves:
            return
    raise AssertionError("it still moves samples after 20 calls in which nothing happened")
