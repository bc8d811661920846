"""Sets of group ids as sorted, merged intervals: the memory of what was trained, in the space of its gaps.

Invariant *canonical*: intervals are disjoint, not adjacent, ascending and end-exclusive, so equal sets are equal
lists. This module must not know what the numbers are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def contains(intervals: Sequence[Interval], number: int) -> bool:
    """Whether `number` lies in one of the canonical `intervals`. Logarithmic."""
    index = bisect_right(intervals, number, key=lambda interval: interval[0]) - 1
    return index >= 0 and number < intervals[index][1]


def merge(intervals: Sequence[Interval], numbers: Iterable[int]) -> list[Interval]:
    """The canonical intervals of the union."""
    pieces = sorted([*intervals, *((number, number + 1) for number in numbers)])
    merged: list[Interval] = []
    for start, end in pieces:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
