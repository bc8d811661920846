"""Sets of ids as intervals."""

from __future__ import annotations

from gyre.workloads.learner.intervals import contains, merge


def test_intervals_are_canonical_whatever_the_order():
    assert merge([], [3, 1, 2, 7]) == [(1, 4), (7, 8)]
    assert merge([(1, 4), (7, 8)], [4, 5, 6]) == [(1, 8)]
    found = [contains([(1, 4), (7, 8)], n) for n in (0, 1, 3, 4, 7, 8)]
    assert found == [False, True, True, False, True, False]
    assert not contains([], 0)
