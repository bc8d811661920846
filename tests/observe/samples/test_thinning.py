"""Which steps are given up for room."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gyre.observe.samples.writer import NEWEST_KEPT, given_up


def test_nothing_goes_while_there_is_room() -> None:
    assert given_up(dict.fromkeys(range(1, 101), 10), 1000) == []


def test_every_second_goes_first_the_oldest_first() -> None:
    sizes = dict.fromkeys(range(1, 101), 10)
    assert given_up(sizes, 1000 - 30) == [3, 5, 7]
    assert given_up(sizes, 1000 - 260)[23:] == [49, 2, 6]  # 50 to 100 are the newest; then every fourth


def test_the_first_and_the_newest_never_go() -> None:
    sizes = dict.fromkeys(range(1, 101), 10)
    gone = given_up(sizes, 0)
    assert sorted({*sizes} - {*gone}) == [1, *range(51, 101)]
    assert given_up(dict.fromkeys(range(1, NEWEST_KEPT + 2), 10), 0) == []
    assert given_up({}, 0) == []


def test_a_long_run_stays_evenly_spread() -> None:
    sizes: dict[int, int] = {}
    for step in range(1, 2001):
        sizes[step] = 10
        for old in given_up(sizes, 1500):
            del sizes[old]
    old = sorted(step for step in sizes if step <= 1950)
    gaps = [after - before for before, after in pairwise(old)]
    assert sum(sizes.values()) <= 1500
    assert old[0] == 1
    assert max(gaps) <= 32, "no part of the run is out of sight"


@given(st.dictionaries(st.integers(1, 10_000), st.integers(0, 100)), st.integers(0, 5000), st.integers(0, 60))
def test_as_few_go_as_have_to(sizes: dict[int, int], bound: int, newest: int) -> None:
    gone = given_up(sizes, bound, newest=newest)
    assert len(gone) == len(set(gone))
    safe = {*sorted(sizes)[:1], *sorted(sizes)[len(sizes) - newest if newest < len(sizes) else 0 :]}
    assert not safe & {*gone} if newest else not {*sorted(sizes)[:1]} & {*gone}
    left = sum(size for step, size in sizes.items() if step not in gone)
    if gone:
        assert left + sizes[gone[-1]] > bound, "the last one had to go"
    if left > bound:
        assert len(sizes) - len(gone) <= newest + 1, "all that may go is gone"
