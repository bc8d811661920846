"""What the router chooses, one situation at a time. What holds for all of them is in test_router_properties."""

from __future__ import annotations

import pytest

from gyre.rollouts.scheduling.lengths import LengthModel
from gyre.rollouts.scheduling.routing_settings import RoutingSettings
from tests.rollouts.scheduling.routed_fleet import Given, RoutedFleet, lines

LIMIT = 2000
"""With nothing learnt, a sample of this limit is expected to get 1,000 tokens."""


def router(
    instances: int = 2, *, slots: int = 8, rate: float | None = 100.0, **settings: float
) -> RoutedFleet:
    found = RoutedFleet(settings=RoutingSettings(**{"overcommit": 0.0, **settings}))  # type: ignore[arg-type]
    for index in range(instances):
        found.join(f"i{index}", max_running=slots, kv_tokens=10**6, rate_tokens_s=rate)
    return found


def submit(
    to: RoutedFleet, *samples: int, group: int | None = None, prompt: int = 100, done: int = 0
) -> None:
    for sample in samples:
        to.submit(
            sample,
            group=sample if group is None else group,
            prompt_tokens=prompt,
            done_tokens=done,
            max_new_tokens=LIMIT,
        )


def spread(of: RoutedFleet, instances: int) -> list[int]:
    return [len(of.held_by(f"i{index}")) for index in range(instances)]


# -- assignment -------------------------------------------------------------------------------------


def test_samples_go_where_the_queue_drains_first() -> None:
    found = router(0)
    found.join("slow", max_running=64, kv_tokens=10**6, rate_tokens_s=100)
    found.join("fast", max_running=64, kv_tokens=10**6, rate_tokens_s=300)
    submit(found, *range(40))
    found.assign()
    assert (len(found.held_by("slow")), len(found.held_by("fast"))) == (10, 30)


def test_what_is_expected_of_a_sample_is_counted_and_not_the_sample() -> None:
    found = router()
    submit(found, 0)
    for sample in (1, 2, 3):
        found.submit(sample, group=sample, prompt_tokens=100, done_tokens=0, max_new_tokens=200)
    found.assign()
    assert spread(found, 2) == [1, 3]


def test_continued_samples_go_first_then_older_groups_then_those_submitted_first() -> None:
    found = router(1, slots=1)
    submit(found, 10, group=3)
    submit(found, 11, group=3)
    submit(found, 12, group=2)
    submit(found, 13, group=9, done=50)
    order = []
    while found.queued():
        (given,) = found.assign()
        order.append(given.sample)
        found.finished(given.sample, 10)
    assert order == [13, 12, 10, 11]


def test_a_group_stays_with_its_prompt_while_that_saves_more_than_it_unbalances() -> None:
    long_prompt = router()
    submit(long_prompt, 0, 1, group=0, prompt=50_000)  # 5,000 tokens' worth of prefill; a sample is 1,000
    long_prompt.assign()
    assert sorted(spread(long_prompt, 2)) == [0, 2]
    short_prompt = router()
    submit(short_prompt, 0, 1, group=0, prompt=50)
    short_prompt.assign()
    assert spread(short_prompt, 2) == [1, 1]


def test_a_hot_instance_is_escaped_from_however_long_the_prompt() -> None:
    found = router(slots=1000, rate=100.0)
    submit(found, *range(200), group=0, prompt=50_000)
    found.assign()
    saved_s = 50_000 * 0.1 / 100
    assert abs(found.drain_s("i0") - found.drain_s("i1")) <= saved_s + 10 + 1e-6
    assert min(spread(found, 2)) > 90


def test_imbalance_counts_only_beyond_what_the_queue_evens_out() -> None:
    found = router(4, slots=8)
    for group in range(16):
        submit(found, *range(group * 8, group * 8 + 8), group=group, prompt=10)
    found.assign()
    homes = [{found.instance_of(sample) for sample in range(group * 8, group * 8 + 8)} for group in range(4)]
    assert found.queued() == 96
    assert all(len(home) == 1 for home in homes)


def test_one_round_trip_is_overcommitted_by_default() -> None:
    found = RoutedFleet()
    found.join("i", max_running=4, kv_tokens=10**6)
    submit(found, *range(10))
    assert len(found.assign()) == 5


@pytest.mark.parametrize("order", [(100.0, 110.0), (110.0, 100.0)])
@pytest.mark.parametrize("prompt", [10, 50_000])
def test_no_sample_waits_for_a_slot_while_another_instance_has_one(
    order: tuple[float, float], prompt: int
) -> None:
    """A slot there now is worth more than a rate that is measured a little higher; also to who has the prompt, where
    the sample would wait for longer than its prompt takes."""
    found = RoutedFleet()
    for index, rate in enumerate(order):
        found.join(f"i{index}", max_running=16, kv_tokens=10**6, rate_tokens_s=rate)
    for group in range(4):
        submit(found, *range(group * 8, group * 8 + 8), group=group, prompt=prompt)
    found.assign()
    assert spread(found, 2) == [16, 16]


def test_a_slot_that_is_soon_free_on_a_fast_instance_is_better_than_one_on_a_slow_one() -> None:
    found = RoutedFleet()
    found.join("slow", max_running=4, kv_tokens=10**6, rate_tokens_s=1.0)
    found.join("fast", max_running=4, kv_tokens=10**6, rate_tokens_s=1000.0)
    submit(found, *range(5))
    found.assign()
    assert len(found.held_by("fast")) == 5


def test_a_limit_is_kept() -> None:
    found = router()
    submit(found, *range(10))
    assert found.assign(3) == [Given(0, "i0"), Given(1, "i1"), Given(2, "i0")]
    assert found.queued() == 7


def test_nothing_goes_to_an_instance_that_does_not_accept() -> None:
    found = router()
    found.admit("i0", False)
    submit(found, *range(10))
    assert {given.instance for given in found.assign()} == {"i1"}
    found.admit("i0", True)
    assert {given.instance for given in found.assign()} == {"i0"}


def test_kv_memory_admits_and_adapts_to_what_is_in_use() -> None:
    lengths = LengthModel()
    for _ in range(500):
        lengths.observe(1000)
    found = RoutedFleet(lengths, RoutingSettings(overcommit=0))
    found.join("i", max_running=1000, kv_tokens=9_500, rate_tokens_s=100)
    submit(found, *range(100), group=0, prompt=100)
    assert len(found.assign()) == 9  # about 1,000 each and the prompt once: beyond 90 % after the ninth
    for _ in range(1000):  # however often it is told
        found.observe("i", rate_tokens_s=100, kv_used_tokens=5_000)
    assert found.assign() == []

    def grow_and_tell(used: int) -> int:
        found.generated("i", 32 * len(found.held_by("i")))
        found.observe("i", rate_tokens_s=100, kv_used_tokens=used)
        return len(found.assign())

    assert sum(grow_and_tell(5_000) for _ in range(12)) == 1
    assert sum(grow_and_tell(9_400) for _ in range(15)) == 0
    for sample in found.held_by("i"):
        found.finished(sample, 1000)
    assert len(found.assign()) == 9  # however long it was full, not down to nothing


def test_a_sample_larger_than_the_memory_still_runs_alone() -> None:
    found = RoutedFleet()
    found.join("i", max_running=8, kv_tokens=100)
    submit(found, 0, 1)
    assert len(found.assign()) == 1


def test_an_instance_that_is_back_keeps_what_it_holds_even_where_it_has_no_room() -> None:
    found = router(1, slots=1)
    found.admit("i0", False)
    submit(found, 0, 1, 2)
    found.place(0, "i0")
    found.place(1, "i0")
    assert (found.queued(), found.held_by("i0")) == (1, [0, 1])
    found.admit("i0", True)
    assert found.assign() == []
    found.finished(0, 10)
    found.finished(1, 10)
    assert found.assign() == [Given(2, "i0")]


def test_an_instance_that_leaves_names_its_samples_and_they_may_be_submitted_again() -> None:
    found = router()
    submit(found, *range(6))
    found.assign()
    gone = found.leave("i0")
    assert gone == [0, 2, 4]
    submit(found, *gone, done=500)
    assert {given.instance for given in found.assign()} == {"i1"}
    assert len(found.held_by("i1")) == 6


def test_an_instance_joins_once_and_with_room() -> None:
    found = router()
    with pytest.raises(ValueError, match="leaves before"):
        found.join("i0", max_running=1, kv_tokens=1)
    with pytest.raises(ValueError, match="0 slots"):
        found.join("i9", max_running=0, kv_tokens=1)


# -- measurements -----------------------------------------------------------------------------------


def test_progress_reduces_what_is_outstanding() -> None:
    found = router(1)
    submit(found, 0, 1)
    found.assign()
    assert found.outstanding_tokens("i0") == 2000
    found.generated("i0", 400)
    assert found.outstanding_tokens("i0") == 1600
    found.finished(0, 1000)
    assert found.outstanding_tokens("i0") == pytest.approx(800)
    found.finished(1, 300)
    assert found.outstanding_tokens("i0") == 0


def test_an_overrun_prediction_is_made_again_rather_than_paid_by_others() -> None:
    found = router(1)
    submit(found, 0, 1)
    found.assign()
    found.generated("i0", 2 * 1500)
    found.assign()
    assert found.outstanding_tokens("i0") == pytest.approx(2 * 250)


def test_an_instance_under_part_load_is_not_taken_for_a_slow_one() -> None:
    found = router(1, slots=64, rate=6400.0)
    submit(found, 0)
    found.assign()
    for _ in range(50):
        found.observe("i0", rate_tokens_s=150, kv_used_tokens=1000)
    assert found.rate_tokens_s("i0") == 6400


def test_a_slow_instance_is_noticed_under_part_load() -> None:
    found = router(1, slots=64, rate=6400.0)
    submit(found, 0)
    found.assign()
    for _ in range(50):
        found.observe("i0", rate_tokens_s=10, kv_used_tokens=1000)
    assert found.rate_tokens_s("i0") == pytest.approx(640, rel=0.01)


def test_an_idle_instance_keeps_its_rate() -> None:
    found = router(1, rate=100.0)
    found.observe("i0", rate_tokens_s=0, kv_used_tokens=0)
    assert found.rate_tokens_s("i0") == 100


def test_an_instance_not_yet_measured_counts_as_a_typical_one() -> None:
    found = router(1, rate=3000.0)
    found.join("new", max_running=8, kv_tokens=10**6)
    assert found.rate_tokens_s("new") == 3000
    found.join("first", max_running=8, kv_tokens=10**6, rate_tokens_s=5000)
    assert found.rate_tokens_s("new") == 4000


# -- moves ------------------------------------------------------------------------------------------


def test_a_newcomer_takes_over_its_share_newest_samples_first() -> None:
    found = router(2, slots=32)
    submit(found, *range(48))
    found.assign()
    found.join("i2", max_running=32, kv_tokens=10**6, rate_tokens_s=100)
    moves = found.rebalance(0.0)
    assert {move.target for move in moves} == {"i2"}
    assert max(spread(found, 3)) - min(spread(found, 3)) <= 4
    assert min(move.sample for move in moves) >= 30
    assert all(found.instance_of(move.sample) == "i2" for move in moves)


def test_an_instance_that_slows_down_gives_samples_away() -> None:
    found = router(2, slots=16, rate=1000.0)
    submit(found, *range(24))
    found.assign()
    assert found.rebalance(0.0) == []
    for _ in range(30):
        found.observe("i0", rate_tokens_s=50 * 12 / 16, kv_used_tokens=1000)
    moves = found.rebalance(1.0)
    assert moves
    assert {(move.source, move.target) for move in moves} == {("i0", "i1")}


def test_a_moved_sample_rests() -> None:
    found = router(1, slots=16, move_cooldown_s=30, cheap_moves=1)
    submit(found, *range(16))
    found.assign()
    found.join("i1", max_running=16, kv_tokens=10**6, rate_tokens_s=100)
    moved = [move.sample for move in found.rebalance(0.0)]
    assert moved
    found.admit("i1", False)
    found.join("i2", max_running=16, kv_tokens=10**6, rate_tokens_s=1000)
    assert not {move.sample for move in found.rebalance(10.0)} & set(moved)
    assert {move.sample for move in found.rebalance(31.0)} & set(moved)


def test_moves_that_are_not_cheap_are_rate_limited() -> None:
    found = router(1, slots=100, moves_burst=4, moves_per_s=2)
    submit(found, *range(100), done=1500)
    found.assign()
    found.join("i1", max_running=100, kv_tokens=10**6, rate_tokens_s=100)
    assert len(found.rebalance(0.0)) == 4
    assert len(found.rebalance(1.0)) == 2


def test_who_is_ready_later_gets_its_share_of_what_the_first_got_at_once_whole_groups() -> None:
    found = router(2, slots=512, rate=None)
    found.serve("i0", 1)
    for sample in range(512):
        found.submit(
            sample, group=sample // 8, prompt_tokens=48, done_tokens=0, max_new_tokens=LIMIT, min_version=1
        )
    assert {given.instance for given in found.assign()} == {"i0"}, (
        "a free slot earns nothing while it is free"
    )
    assert found.deal(0.0) == [], "nobody came who may have them"
    found.serve("i1", 1)
    moves = found.deal(0.2)
    assert 250 <= len(moves) <= 262
    assert len({move.sample // 8 for move in moves}) <= 33
    assert found.deal(0.3) == []


def test_samples_that_stay_do_not_hide_those_that_may_move() -> None:
    found = router(1, slots=200, rate=20_000.0)
    submit(found, *range(100))
    found.assign()
    submit(found, *range(100, 200))
    found.assign()
    for sample in range(100, 200):
        found.samples[sample].stays = True
    found.join("i1", max_running=200, kv_tokens=10**6, rate_tokens_s=20_000.0)
    assert {move.sample for move in found.deal(0.0)} >= set(range(10, 100))


def test_what_its_instance_cannot_begin_moves_to_whoever_has_a_slot_however_little_that_wins() -> None:
    found = router(1, slots=16, overcommit=0.25)
    for sample in range(20):
        found.submit(sample, group=sample, prompt_tokens=10, done_tokens=0, max_new_tokens=2)
    found.assign()
    assert spread(found, 1) == [20]
    found.join("i1", max_running=3, kv_tokens=10**6, rate_tokens_s=100)
    assert {move.sample for move in found.deal(0.0)} == {17, 18, 19}, "its slots, and no deeper"
    found.finished(0, 2)
    assert found.deal(0.0) == [], "16 run there, and it has none beyond"
    found.finished(17, 2)
    assert found.deal(0.0) == []


def test_a_sample_with_many_tokens_does_not_move_for_what_a_fresh_one_does() -> None:
    def moved(done: int) -> int:
        found = router(1, slots=100, rate=20_000.0)
        submit(found, *range(100), done=done)
        found.assign()
        found.join("i1", max_running=100, kv_tokens=10**6, rate_tokens_s=20_000.0)
        return len(found.deal(0.0))

    assert 45 <= moved(0) <= 50
    assert moved(1500) == 0


def test_samples_stay_where_a_step_takes_as_long_with_half_of_them() -> None:
    found = router(1, slots=100)
    submit(found, *range(100))
    found.assign()
    before = 100
    for running in (100, 90, 60, 50, 50, 60, 90, 100):
        found.placement.load.observe(
            found.instances["i0"],
            rate_tokens_s=(before + running) / 2 / 0.01,
            running=running,
            kv_used_tokens=0,
        )
        before = running
    found.join("i1", max_running=100, kv_tokens=10**6)
    assert found.deal(0.0) == []


def test_a_rate_that_is_told_again_is_no_new_measurement() -> None:
    found = router(1, slots=100, rate=None)
    submit(found, *range(100))
    found.assign()
    found.observe("i0", rate_tokens_s=2000, kv_used_tokens=0)
    found.observe("i0", rate_tokens_s=2000, kv_used_tokens=0)
    assert found.rate_tokens_s("i0") == pytest.approx(2000)
    found.placement.load.observe(found.instances["i0"], rate_tokens_s=50, running=2, kv_used_tokens=0)
    for running in (90, 100, 100, 100):  # it tells it again whenever a sample ends, while more begin
        found.placement.load.observe(
            found.instances["i0"], rate_tokens_s=50, running=running, kv_used_tokens=0
        )
    assert found.rate_tokens_s("i0") == pytest.approx(2000)


def test_a_long_prefix_is_not_recomputed_for_a_small_gain() -> None:
    found = router(1, slots=8)
    submit(found, 0, 1, 2, 3, prompt=100_000)  # 10,000 tokens' worth each; they differ in group
    found.assign()
    found.join("i1", max_running=8, kv_tokens=10**6, rate_tokens_s=100)
    assert found.rebalance(0.0) == []


def test_nothing_moves_while_the_queue_evens_it_out() -> None:
    found = router(1, slots=16)
    submit(found, *range(500))
    found.assign()
    found.join("i1", max_running=1, kv_tokens=10**6, rate_tokens_s=100)
    assert found.rebalance(0.0) == []


def tail(slow_speed: float) -> RoutedFleet:
    found = router(2, slots=8, rate=800.0)
    submit(found, 0, 1)
    found.assign()
    for _ in range(30):
        found.observe("i0", rate_tokens_s=slow_speed, kv_used_tokens=100)
        found.observe("i1", rate_tokens_s=100.0, kv_used_tokens=100)
    return found


def test_a_straggler_goes_to_a_much_faster_idle_instance() -> None:
    found = tail(slow_speed=20.0)
    found.finished(1, 400)
    assert [(move.source, move.target) for move in found.stragglers(0.0)] == [("i0", "i1")]
    assert found.stragglers(1.0) == []


def test_a_sample_that_is_hardly_slower_stays() -> None:
    found = tail(slow_speed=90.0)
    found.finished(1, 400)
    assert found.stragglers(0.0) == []


def test_stragglers_are_not_looked_for_while_there_is_much_to_do() -> None:
    found = tail(slow_speed=20.0)
    submit(found, *range(10, 18))
    found.assign()
    assert found.stragglers(0.0) == []


# -- cost -------------------------------------------------------------------------------------------


def lines_of(instances: int, samples: int) -> float:
    found = RoutedFleet(LengthModel(), RoutingSettings(overcommit=0))
    for index in range(instances):
        found.join(f"i{index}", max_running=16, kv_tokens=10**6, rate_tokens_s=1000 + index)
    with lines() as counted:
        replace_all(found, samples)
    return counted.count / (2 * samples)


def replace_all(found: RoutedFleet, samples: int) -> None:
    for sample in range(samples):
        found.submit(sample, group=sample // 8, prompt_tokens=100, done_tokens=0, max_new_tokens=LIMIT)
    assert len(found.assign()) == samples
    for sample in range(samples):
        name = found.instance_of(sample)
        assert name is not None
        found.generated(name, 10)
        found.finished(sample, 900)
        found.submit(
            sample + samples, group=sample // 8, prompt_tokens=100, done_tokens=0, max_new_tokens=LIMIT
        )
        assert len(found.assign()) == 1


def test_the_cost_of_an_assignment_does_not_grow_with_the_fleet() -> None:
    small, large = lines_of(8, 128), lines_of(128, 2048)
    assert large < 1.5 * small


def test_no_single_decision_predicts_everything_again() -> None:
    found = RoutedFleet()
    for index in range(200):
        found.join(f"i{index}", max_running=16, kv_tokens=10**6, rate_tokens_s=1000)
    submit(found, *range(3200))
    found.assign()
    predicted: list[int] = []
    expected_remaining = found.placement.load.lengths.expected_remaining

    def counted(done_tokens: float, max_new_tokens: int) -> float:
        predicted[-1] += 1
        return expected_remaining(done_tokens, max_new_tokens)

    found.placement.load.lengths.expected_remaining = counted  # type: ignore[method-assign, assignment]
    for index in range(200):
        found.generated(f"i{index}", 16 * 400)
    for _ in range(10):
        predicted.append(0)
        found.assign()
        for index in range(200):
            found.generated(f"i{index}", 0)
    assert max(predicted) < 600
    assert sum(predicted) == 3200
    assert found.outstanding_tokens("i0") == pytest.approx(16 * 800)
    assert found.outstanding_tokens("i199") == pytest.approx(16 * 800)


@pytest.mark.parametrize("prompt", [0, 5000])
def test_memory_follows_what_is_there_and_not_what_was(prompt: int) -> None:
    found = router(4, slots=8)
    submit(found, *range(100), group=0, prompt=prompt)
    for sample in range(100, 8000):
        submit(found, sample, group=sample // 8, prompt=prompt)
        found.assign()
        held = next(held for index in range(4) if (held := found.held_by(f"i{(sample + index) % 4}")))
        if sample % 3:
            found.finished(held[0], 900)
        else:
            found.withdraw(held[0])
            submit(found, held[0], group=held[0] // 8, prompt=prompt)
            found.finished(held[-1], 900)
    live, queue = len(found.samples), found.queue
    assert live < 4000
    assert len(queue.groups) <= live
    assert all(len(line.heap) <= 2 * live + 64 for line in queue._lines.values())
    assert sum(map(len, found.open._heaps.values())) <= 4 * 4 + 64 + 100
    assert all(len(line.new_groups) <= 2 * live + 64 for line in queue._lines.values())
    assert all(len(instance.wanted_groups) <= 2 * 8 + 64 for instance in found.instances.values())
    assert sum(len(group.heap) for group in queue.groups.values()) <= 2 * live + 64
