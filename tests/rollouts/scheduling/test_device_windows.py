"""The local window: what is planned for a state, and what becomes of steps that follow the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.scheduling.device_windows import (
    UNTIL_DONE,
    Smoothed,
    TrainTime,
    WindowState,
    plan_window,
)
from tests.rollouts.scheduling.window_sim import (
    LOST_S,
    Ancestor,
    Fixed,
    Fleet,
    Planned,
    Step,
    lengths_of_step,
    oracle,
    run_step,
)

STATE = WindowState(
    now_s=100.0,
    tokens_left=100_000,
    samples_left=1000,
    longest_left_tokens=100,
    sample_tokens_s=1000,
    local_tokens_s=1000,
    remote_tokens_s=1000,
    train_s=40,
    switch_s=0,
)

# -- the plan ---------------------------------------------------------------------------------------


def test_both_sides_end_together() -> None:
    window = plan_window(STATE)
    # 30 s together leave 40,000 tokens to the remote instances, which is as long as training takes.
    assert window.until_s == pytest.approx(130.0)
    assert "together" in window.reason


@pytest.mark.parametrize(
    ("change", "until_s", "reason"),
    [
        ({"tokens_left": 0.0}, 100.0, "nothing is left"),
        ({"remote_tokens_s": 0.0}, UNTIL_DONE, "no remote instance"),
        ({"remote_tokens_s": 0.0, "generating": False}, UNTIL_DONE, "no remote instance"),
        ({"remote_tokens_s": 10_000.0}, 100.0, "finish before"),
        (
            {"remote_tokens_s": 1000.0, "generating": False, "train_s": 99.0, "switch_s": 1.0},
            100.0,
            "training has begun",
        ),
        ({"local_tokens_s": 0.0, "generating": False}, 100.0, "no local engines"),
    ],
)
def test_the_ends_of_the_scale(change: dict[str, float], until_s: float, reason: str) -> None:
    window = plan_window(replace(STATE, **change))  # type: ignore[arg-type]
    assert window.until_s == until_s
    assert reason in window.reason
    assert window.is_open(STATE.now_s) == (until_s > STATE.now_s)


def test_local_engines_open_again_only_for_what_is_worth_two_switches() -> None:
    closed = replace(STATE, generating=False, switch_s=5.0, train_s=20.0)
    assert plan_window(closed).until_s == pytest.approx(135.0)
    assert not plan_window(replace(closed, train_s=70.0)).is_open(STATE.now_s)


def test_the_window_is_longer_with_fewer_remote_instances_and_shorter_with_more_to_train() -> None:
    assert plan_window(replace(STATE, remote_tokens_s=500)).until_s > plan_window(STATE).until_s
    assert plan_window(replace(STATE, train_s=60)).until_s < plan_window(STATE).until_s


def test_where_the_longest_sample_ends_the_step_the_window_is_shorter() -> None:
    tail = replace(STATE, sample_tokens_s=10, samples_left=100, longest_left_tokens=2000)
    window = plan_window(tail)
    assert "longest" in window.reason
    assert 100 <= window.until_s < 260


def test_an_end_within_the_noise_of_the_last_one_stays() -> None:
    assert plan_window(replace(STATE, planned_until_s=131.0)).until_s == 131.0
    assert plan_window(replace(STATE, planned_until_s=140.0)).until_s == pytest.approx(130.0)
    assert plan_window(replace(STATE, planned_until_s=90.0)).until_s == pytest.approx(130.0)


@settings(deadline=None)
@given(
    tokens=st.floats(0, 1e9),
    samples=st.integers(0, 10**5),
    longest=st.floats(0, 1e6),
    speeds=st.tuples(*[st.just(0.0) | st.floats(0.01, 1e6)] * 3),
    times=st.tuples(st.floats(0, 1e5), st.floats(0, 1e3), st.floats(0, 1e2)),
    generating=st.booleans(),
)
def test_there_is_always_a_plan_with_a_reason(
    tokens: float,
    samples: int,
    longest: float,
    speeds: tuple[float, float, float],
    times: tuple[float, float, float],
    generating: bool,
) -> None:
    state = WindowState(50.0, tokens, samples, longest, *speeds, *times, generating)
    window = plan_window(state)
    assert window.reason
    assert window.until_s >= state.now_s
    assert not math.isnan(window.until_s)
    assert tokens > 0 or not window.is_open(state.now_s)


def test_alternating_noise_is_averaged_out() -> None:
    smoothed = Smoothed(20.0)
    for at in range(200):
        smoothed.observe(100.0 + 50.0 * (-1) ** at, float(at))
    assert smoothed.value == pytest.approx(100, rel=0.03)


def test_training_time_follows_what_was_measured() -> None:
    train_time = TrainTime(half_life=1)
    assert train_time.predict_s(1000) == 0
    for _ in range(20):
        train_time.observe(1000, 10.0)
    assert train_time.predict_s(500) == pytest.approx(5)
    for _ in range(20):
        train_time.observe(1000, 20.0)
    assert train_time.predict_s(500) == pytest.approx(10, rel=0.01)


# -- the loop ---------------------------------------------------------------------------------------


def steady(count: int) -> Fleet:
    return lambda now_s: count


def planned() -> Planned:
    policy = Planned()
    policy.learn(lengths_of_step(999))
    return policy


def total(steps: list[Step]) -> tuple[float, float]:
    return sum(step.duration_s for step in steps), sum(step.idle_s for step in steps)


@pytest.mark.parametrize("counts", [(3,) * 5, (2, 2, 4, 4, 1, 1, 6, 6)])
def test_steps_are_as_short_as_with_the_best_windows_and_neither_side_waits_longer(
    counts: tuple[int, ...],
) -> None:
    ours, ancestor, best = [], [], []
    policy, rule = planned(), Ancestor()
    for index, count in enumerate(counts):
        lengths, fleet = lengths_of_step(index), steady(count)
        ours.append(run_step(policy, lengths, fleet))
        policy.learn(lengths)
        ancestor.append(run_step(rule, lengths, fleet))
        best.append(oracle(lengths, fleet))
    assert total(ours)[0] <= 1.04 * total(best)[0]
    assert total(ours)[1] <= 1.1 * total(best)[1]
    if len(set(counts)) > 1:
        assert total(ours)[0] < total(ancestor)[0]
        assert total(ours)[1] < total(ancestor)[1]
    assert not any(step.opened for step in ours)


def test_a_step_ends_without_any_remote_instance() -> None:
    step = run_step(planned(), lengths_of_step(1), steady(0))
    assert step.duration_s < LOST_S
    assert step.duration_s <= step.generated_s + 100


def test_when_every_remote_instance_is_lost_the_local_engines_open_again() -> None:
    def lost(now_s: float) -> int:
        return 4 if now_s < 150 else 0

    policy = planned()
    step = run_step(policy, lengths_of_step(2), lost)
    assert step.opened == 1
    assert step.duration_s < LOST_S
    assert (
        run_step(Fixed(60.0), lengths_of_step(2), lost).duration_s >= LOST_S
    )  # what a fixed window comes to


def test_remote_instances_that_come_in_the_middle_of_a_step_end_the_window_sooner() -> None:
    def gained(now_s: float) -> int:
        return 0 if now_s < 40 else 5

    step = run_step(planned(), lengths_of_step(3), gained)
    assert step.duration_s <= 1.06 * oracle(lengths_of_step(3), gained).duration_s
    assert step.duration_s < 0.9 * run_step(planned(), lengths_of_step(3), steady(0)).duration_s


def test_alternating_noise_moves_neither_the_plan_nor_the_end() -> None:
    calm, shaken = planned(), planned()
    quiet = run_step(calm, lengths_of_step(4), steady(3))
    noisy = run_step(shaken, lengths_of_step(4), steady(3), noise=0.3, seed=1)
    assert noisy.duration_s == pytest.approx(quiet.duration_s, rel=0.04)
    assert noisy.opened == 0
    ends = [plan.until_s for plan in shaken.plans[10:] if math.isfinite(plan.until_s)]
    open_ends = ends[
        : next((at for at, plan in enumerate(shaken.plans[10:]) if "begun" in plan.reason), len(ends))
    ]
    turns = [abs(after - before) for before, after in pairwise(open_ends)]
    assert max(turns, default=0.0) < 0.15 * quiet.duration_s
