"""Prompts are read together: the rule against a played engine, in virtual time."""

from __future__ import annotations

import math

import pytest

from gyre.rollouts.agent.prompt_batching import PATIENCE, PromptBatching

SLOTS, STEP_S, PASS_S = 256, 0.010, 0.020
MEAN_TOKENS = 256


def batching(step_s: float = STEP_S, pass_s: float = PASS_S) -> PromptBatching:
    made = PromptBatching(SLOTS)
    made.stepped(step_s)
    made.passed(pass_s)
    return made


def played(give: object, seconds: float = 60.0) -> tuple[float, int]:
    """An engine whose samples end one after another, at even distances, while others wait: tokens per second, and the
    number of passes. `give(now, running)` says how many are given to it."""
    now, running, passes, tokens, owed = 0.0, SLOTS, 0, 0.0, 0.0
    while now < seconds:
        count = give(now, running)  # type: ignore[operator]
        if count:
            running, passes, now = running + count, passes + 1, now + PASS_S
        tokens += running
        owed += running / MEAN_TOKENS
        now += STEP_S
        ended = int(owed)
        running, owed = running - ended, owed - ended
    return tokens / seconds, passes


def rate_of_batches(size: int) -> float:
    return played(lambda now, running: SLOTS - running if SLOTS - running >= size else 0)[0]


def test_an_engine_that_was_not_measured_gets_everything_at_once() -> None:
    unknown = PromptBatching(SLOTS)
    assert unknown.due(0.0, running=0, waiting=40) == 40
    assert unknown.due(0.1, running=200, waiting=40) == 40


def test_an_idle_engine_never_waits() -> None:
    assert batching().due(5.0, running=0, waiting=3) == 3


def test_slots_that_nobody_waits_for_are_not_idle() -> None:
    some = batching()
    assert some.due(0.0, running=100, waiting=0) == 0
    assert some.wait_s(100) == math.inf
    assert some.due(100.0, running=100, waiting=1) == 0, "it begins to wait now"


def test_a_full_engine_gets_nothing() -> None:
    some = batching()
    assert some.due(0.0, running=SLOTS, waiting=50) == 0
    assert some.wait_s(SLOTS) == math.inf


def test_a_batch_goes_when_the_idle_slots_have_cost_as_much_as_the_pass_will() -> None:
    some = batching()
    running, idle = 200, 50
    due_after = running * PASS_S / idle
    assert some.due(0.0, running, waiting=idle) == 0
    assert some.wait_s(running) == pytest.approx(due_after)
    assert some.due(due_after * 0.99, running, waiting=idle) == 0
    assert some.due(due_after * 1.01, running, waiting=idle) == idle
    assert some.due(due_after * 1.02, running + idle, waiting=idle) == 0, "it begins anew"


def test_the_last_samples_of_a_step_do_not_wait_for_company() -> None:
    """Thirteen beside hundreds of free slots: that nobody else needs these does not make the step end sooner."""
    some = batching()
    assert some.due(0.0, running=200, waiting=13) == 0
    assert some.due(0.1, running=180, waiting=13) == 0
    assert some.wait_s(180) == pytest.approx(PATIENCE * PASS_S - 0.1)
    assert some.due(PATIENCE * PASS_S, running=180, waiting=13) == 13
    assert some.due(PATIENCE * PASS_S + 0.01, running=193, waiting=1) == 0, "the next one begins to wait"


def test_the_rule_is_as_good_as_the_best_fixed_size_and_better_than_one_by_one() -> None:
    some = batching()
    rate, passes = played(lambda now, running: some.due(now, running, waiting=SLOTS))
    best = max(rate_of_batches(size) for size in range(1, 100))
    assert rate > 0.99 * best
    assert rate > 1.3 * rate_of_batches(1)
    assert passes < 600


@pytest.mark.parametrize(
    ("measured", "cost"),
    [(0.0001, STEP_S), (0.030, 0.030), (9.0, 5 * STEP_S)],
    ids=["no less than a step", "as measured", "no more than five steps"],
)
def test_what_a_pass_costs_is_bounded_by_steps(measured: float, cost: float) -> None:
    assert batching(pass_s=measured).pass_s == pytest.approx(cost)


def test_the_shortest_pass_counts_for_long_prompts_take_their_time_anyway() -> None:
    some = batching(pass_s=0.030)
    for _ in range(10):
        some.passed(0.4)
    assert some.pass_s == pytest.approx(0.030)
