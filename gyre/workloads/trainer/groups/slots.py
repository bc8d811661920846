"""Which group stands in which slot of the run.

A run has `steps * prompts_per_step` slots, numbered from 0, and draws prompts for them in order. A group's id is the
number of its prompt; without replacements a slot and its group have the same number. A group that is given up is
replaced by a newly drawn one in the same slot, and the prompts drawn for later slots move up by one.

Invariant *as it was*: which group stands in a slot that was drawn follows from the replacements alone, whenever and
by whomever it is computed.

This module must not know why a group is replaced.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping


class Slots:
    def __init__(self, replaced: Mapping[int, int]) -> None:
        """`replaced` maps each group that was given up to the group in its slot."""
        self._successor = dict(replaced)
        self._predecessor = {new: old for old, new in replaced.items()}
        self._replacements = sorted(self._predecessor)
        self._drawn_before = [by - place for place, by in enumerate(self._replacements)]
        """For each replacement, how many slots were drawn before it. Never falls, because ids only grow."""

    def replace(self, group_id: int, by: int) -> None:
        """`by` is greater than any id that was drawn. Raises ValueError if it is not."""
        if self._replacements and by <= self._replacements[-1]:
            raise ValueError(
                f"group {by} would replace {group_id} after group {self._replacements[-1]} was drawn"
            )
        self._successor[group_id] = by
        self._predecessor[by] = group_id
        self._replacements.append(by)
        self._drawn_before.append(by - len(self._drawn_before))

    def id_at(self, slot: int) -> int:
        group_id = slot + bisect_right(self._drawn_before, slot)  # a replacement's id has no slot of its own
        while group_id in self._successor:
            group_id = self._successor[group_id]
        return group_id

    def slot_of(self, group_id: int) -> int:
        while group_id in self._predecessor:
            group_id = self._predecessor[group_id]
        return group_id - bisect_left(self._replacements, group_id)
