"""Which group stands in which slot, however many were replaced."""

from __future__ import annotations

from typing import Any

from gyre.workloads.trainer.groups.group_state import GroupSlots

REPLACED = 100_000


class NeverWalked(list[Any]):
    """A list that is looked into here and there, and never walked through."""

    def __iter__(self) -> Any:
        raise AssertionError("it is walked through")


def test_each_slot_has_one_group_and_each_group_one_slot() -> None:
    slots, drawn = GroupSlots({}), 0
    for slot in range(40):
        drawn = max(drawn, slots.id_at(slot)) + 1
        for _ in range(slot % 3):
            slots.replace(slots.id_at(slot), drawn)
            drawn += 1
    ids = [slots.id_at(slot) for slot in range(40)]
    assert sorted(ids) == sorted(set(ids))
    assert [slots.slot_of(one) for one in ids] == list(range(40))


def test_what_it_looks_up_does_not_grow_with_what_was_replaced() -> None:
    slots = GroupSlots({2 * number: 2 * number + 1 for number in range(REPLACED)})
    for name in ("_replacements", "_drawn_before"):
        setattr(slots, name, NeverWalked(getattr(slots, name)))
    for slot in (0, REPLACED // 2, REPLACED - 1, REPLACED + 10):
        assert slots.slot_of(slots.id_at(slot)) == slot
