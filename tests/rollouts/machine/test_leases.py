"""What is known of leases that ended: the last ones, in a table that never grows."""

from __future__ import annotations

import tracemalloc

from gyre.rollouts.plane.leases import EndedLease, EndedLeases

EPOCH = 3 << 40
LIMIT = 100


def note(ended: EndedLeases, lease: int, length: int) -> None:
    ended.note(lease, "i", 7, EndedLease(length, LIMIT))


def length_at(ended: EndedLeases, lease: int) -> int | None:
    found = ended.find(lease, "i", 7)
    return found.length if found is not None else None


def test_a_lease_that_ended_is_known_until_it_is_forgotten() -> None:
    ended = EndedLeases(8)
    note(ended, EPOCH + 1, 17)
    note(ended, EPOCH + 2, 0)
    assert ended.find(EPOCH + 1, "i", 7) == EndedLease(17, LIMIT)
    ended.forget(EPOCH + 1)
    assert length_at(ended, EPOCH + 1) is None
    assert length_at(ended, EPOCH + 2) == 0, "ended before its first token came in"


def test_what_nobody_noted_is_not_known() -> None:
    ended = EndedLeases(8)
    note(ended, EPOCH + 3, 5)
    ended.forget(EPOCH + 3 + 8)
    assert length_at(ended, 0) is None, "an empty slot is nobody's"
    assert length_at(ended, EPOCH + 3 + 8) is None, "another lease of the same slot"
    assert length_at(ended, (2 << 40) + 3) is None, "a lease of an earlier manager"
    assert ended.find(EPOCH + 3, "another", 7) is None, "another incarnation's"
    assert ended.find(EPOCH + 3, "i", 8) is None, "another sample's"
    assert length_at(ended, EPOCH + 3) == 5


def test_the_last_ones_are_known_in_whatever_order_they_ended() -> None:
    ended = EndedLeases(64)
    for lease in range(1000):
        note(ended, EPOCH + (lease ^ 7), lease)  # blocks of eight, each backwards
    assert [length_at(ended, EPOCH + (lease ^ 7)) for lease in range(936, 1000)] == list(range(936, 1000))
    assert length_at(ended, EPOCH + 935) is None


def test_a_million_leases_take_no_more_room_than_the_first() -> None:
    """A table that grew and was made anew left holes in the manager's memory: 13 bytes a sample, over a million."""
    ended = EndedLeases(1 << 10)
    tracemalloc.start()
    try:
        for lease in range(20_000):
            note(ended, EPOCH + lease, 48)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 1024
