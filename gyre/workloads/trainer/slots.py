"""Which group stands in which place of the run.

A run has `steps * prompts_per_step` places, numbered from 0, and draws prompts for them in order. Group ids are the
prompts' numbers; without replacements a place and its group have the same number. A group that is set aside is
replaced by a newly drawn one in the same place, and what is drawn for later places moves up by one.

Invariant *as it was*: which group stands in a place that was drawn follows from the replacements alone, whenever and
by whomever it is asked.

This module must not know why a group is replaced.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping


class Slots:
    def __init__(self, replaced: Mapping[int, int]) -> None:
        """`replaced` maps groups that were set aside to those in their place."""
        self._by = dict(replaced)
        self._for = {new: old for old, new in replaced.items()}
        self._new = sorted(self._for)

    def replace(self, group_id: int, by: int) -> None:
        """`by` is greater than any id that was drawn."""
        self._by[group_id] = by
        self._for[by] = group_id
        insort(self._new, by)

    def id_at(self, place: int) -> int:
        group_id = place
        for new in self._new:  # ids that were not drawn for a place of their own are passed over
            if new > group_id:
                break
            group_id += 1
        while group_id in self._by:
            group_id = self._by[group_id]
        return group_id

    def place_of(self, group_id: int) -> int:
        while group_id in self._for:
            group_id = self._for[group_id]
        return group_id - bisect_left(self._new, group_id)
