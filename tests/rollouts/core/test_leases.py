"""What is known of leases that ended: the last ones, in a table that never grows."""

from __future__ import annotations

import tracemalloc

from gyre.rollouts.core.leases import EndedLeases

EPOCH = 3 << 40


def test_a_lease_that_ended_is_known_once() -> None:
    ended = EndedLeases(8)
    ended.note(EPOCH + 1, 17)
    ended.note(EPOCH + 2, 0)
    assert ended.take(EPOCH + 1) == 17
    assert ended.take(EPOCH + 1) is None
    assert ended.take(EPOCH + 2) == 0, "ended before its first token came in"


def test_what_nobody_noted_is_not_known() -> None:
    ended = EndedLeases(8)
    ended.note(EPOCH + 3, 5)
    assert ended.take(0) is None, "an empty slot is nobody's"
    assert ended.take(EPOCH + 3 + 8) is None, "another lease of the same slot"
    assert ended.take((2 << 40) + 3) is None, "a lease of an earlier manager"
    assert ended.take(EPOCH + 3) == 5


def test_the_last_ones_are_known_in_whatever_order_they_ended() -> None:
    ended = EndedLeases(64)
    for lease in range(1000):
        ended.note(EPOCH + (lease ^ 7), lease)  # blocks of eight, each backwards
    assert [ended.take(EPOCH + (lease ^ 7)) for lease in range(936, 1000)] == list(range(936, 1000))
    assert ended.take(EPOCH + 935) is None


def test_a_million_leases_take_no_more_room_than_the_first() -> None:
    """A table that grew and was made anew left holes in the manager's memory: 13 bytes a sample, over a million."""
    ended = EndedLeases(1 << 10)
    tracemalloc.start()
    try:
        for lease in range(20_000):
            ended.note(EPOCH + lease, 48)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 1024
