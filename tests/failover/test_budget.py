"""How often, and how long to wait."""

from __future__ import annotations

import pytest

from gyre.config import Budget, FailoverSpec
from gyre.failover.budget import affordable, backoff_s, within

BUDGET = Budget(max=2, window_s=10)


@pytest.mark.parametrize(
    ("uses", "now", "left"),
    [
        ((), 0.0, ()),
        ((1.0,), 1.0, (1.0,)),
        ((1.0,), 10.999, (1.0,)),
        ((1.0,), 11.0, ()),
        ((1.0, 5.0), 12.0, (5.0,)),
        ((20.0,), 5.0, (20.0,)),
    ],
    ids=["none", "now", "just within", "just gone", "one gone", "a clock set back"],
)
def test_a_use_counts_for_the_window(uses: tuple[float, ...], now: float, left: tuple[float, ...]) -> None:
    assert within(uses, BUDGET, now) == left


@pytest.mark.parametrize(
    ("uses", "now", "possible"),
    [((), 0.0, True), ((0.0,), 1.0, True), ((0.0, 0.5), 1.0, False), ((0.0, 0.5), 10.0, True)],
)
def test_affordable_up_to_the_maximum(uses: tuple[float, ...], now: float, possible: bool) -> None:
    assert affordable(uses, BUDGET, now) is possible


def test_a_budget_of_none_affords_nothing() -> None:
    assert not affordable((), Budget(max=0, window_s=10), 0.0)


@pytest.mark.parametrize(
    ("earlier", "wait_s"),
    [(-1, 0.0), (0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (10, 5.0), (2000, 5.0)],
)
def test_the_first_repair_is_at_once_and_later_ones_wait_twice_as_long(earlier: int, wait_s: float) -> None:
    assert backoff_s(earlier, FailoverSpec(backoff_s=0.5, backoff_max_s=5.0)) == wait_s


def test_no_backoff_can_be_asked_for() -> None:
    assert backoff_s(7, FailoverSpec(backoff_s=0.0)) == 0.0
