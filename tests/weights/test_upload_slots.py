"""Upload slots: a few callers at a time, and nobody waits without need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre.weights.transfer.upload_slots import LEAST, LONGEST_S, MOST, SHORTEST_S, SOON_S, UploadSlots
from tests.weights.plane import until


@pytest.fixture
def slots(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gyre.weights.transfer.upload_slots.time.monotonic", lambda: now[0])
    made = UploadSlots()
    made.now = now
    return made


def test_callers_beyond_the_limit_get_no_slot(slots):
    held = [slots.take(f"caller {at}") for at in range(LEAST)]
    assert all(held)
    assert slots.take("one more") is None
    held[0].release()
    assert slots.take("one more") is not None


def test_a_caller_that_is_alone_gets_every_slot_it_asks_for(slots):
    assert all(slots.take("alone") for _ in range(3 * MOST))
    assert slots.take("another") is None
    assert slots.take("alone") is not None


def test_a_slot_is_released_once(slots):
    first, second = slots.take("a"), slots.take("b")
    first.release()
    first.release()
    assert slots.take("c") is not None
    assert slots.take("d") is None
    second.release()


@pytest.mark.parametrize(("bytes_s", "limit"), [(1e6, LEAST), (39e6, 4), (10e9, MOST)])
def test_the_limit_follows_the_link(slots, bytes_s, limit):
    """It is the number of chunks, here of 1 MB, that the link carries within `SOON_S`."""
    assert SOON_S == 0.1
    for _ in range(20):
        both = [slots.take("a"), slots.take("b")]
        slots.now[0] += 2e6 / bytes_s
        both[0].release(1_000_000)
        both[1].release()
    assert slots.limit == limit


def test_slots_of_slow_callers_lapse(slots):
    """Their chunks go on at a few kilobytes a second."""
    slow = [slots.take(f"slow {at}", nbytes=64 << 20) for at in range(LEAST)]
    slots.now[0] += LONGEST_S
    for slot in slow:
        slot.went_on()
    assert slots.take("other") is None
    slots.now[0] += 0.1
    for slot in slow:
        slot.went_on()
    for _ in range(5):  # these measure the link
        other = slots.take("other", nbytes=64 << 20)
        slots.now[0] += 0.05
        other.release(64 << 20)
    assert slots.held_s(64 << 20) == SHORTEST_S
    for slot in slow:  # their end gives back no slot a second time
        slot.release(64 << 20)
        slot.release()
    held = [slots.take(f"caller {at}") for at in range(slots.limit)]
    assert all(held)
    assert slots.take("one more") is None


def test_on_a_slow_link_slots_last_longer(slots):
    """Also if the link became slow and all slots lapsed before their chunks ended."""
    for seconds in (0.01, *[3.0] * 40):
        both = [slots.take(f"caller {at}", nbytes=20 << 20) for at in range(LEAST)]
        slots.now[0] += seconds
        for slot in both:
            slot.went_on()
        for slot in both:
            slot.release(20 << 20)
    both = [slots.take(f"caller {at}", nbytes=20 << 20) for at in range(LEAST)]
    slots.now[0] += 4.0
    for slot in both:
        slot.went_on()
    assert slots.take("another") is None


def test_waiting_callers_are_served_in_order():
    slots, served = UploadSlots(), []

    def wait(name: str) -> None:
        slot = slots.take(name, 60.0)
        assert slot is not None
        served.append(name)
        slot.release()

    held = [slots.take("a"), slots.take("b")]
    with ThreadPoolExecutor(3) as pool:
        for count, name in enumerate(["first", "second", "third"], 1):
            pool.submit(wait, name)
            until(lambda count=count: len(slots._waiting) == count)
        assert slots.take("late") is None  # waiting callers come first
        held[0].release()
    assert served == ["first", "second", "third"]


def test_a_wait_for_a_slot_ends():
    slots = UploadSlots()
    held = [slots.take("a"), slots.take("b")]
    assert slots.take("c", 0.01) is None
    assert not slots._waiting
    assert all(held)
