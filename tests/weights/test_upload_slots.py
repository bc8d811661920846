"""Turns: a few callers at a time, and nobody waits who need not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre.weights.transfer.upload_slots import LEAST, LONGEST_S, MOST, SHORTEST_S, SOON_S, UploadSlots
from tests.weights.plane import until


@pytest.fixture
def turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gyre.weights.transfer.upload_slots.time.monotonic", lambda: now[0])
    made = UploadSlots()
    made.now = now
    return made


def test_callers_beyond_the_limit_are_told_that_there_is_no_turn(turns):
    held = [turns.take(f"caller {at}") for at in range(LEAST)]
    assert all(held)
    assert turns.take("one more") is None
    held[0].let_go()
    assert turns.take("one more") is not None


def test_who_is_alone_sends_as_much_as_he_asks_for(turns):
    assert all(turns.take("he") for _ in range(3 * MOST))
    assert turns.take("another") is None
    assert turns.take("he") is not None


def test_a_turn_is_let_go_once(turns):
    first, second = turns.take("a"), turns.take("b")
    first.let_go()
    first.let_go()
    assert turns.take("c") is not None
    assert turns.take("d") is None
    second.let_go()


@pytest.mark.parametrize(("bytes_s", "limit"), [(1e6, LEAST), (39e6, 4), (10e9, MOST)])
def test_the_limit_follows_the_link(turns, bytes_s, limit):
    """Of chunks of a megabyte on a link that two of them share: as many as it carries within SOON_S."""
    assert SOON_S == 0.1
    for _ in range(20):
        both = [turns.take("a"), turns.take("b")]
        turns.now[0] += 2e6 / bytes_s
        both[0].let_go(1_000_000)
        both[1].let_go()
    assert turns.limit == limit


def test_two_slow_callers_do_not_keep_the_others_from_it(turns):
    """Whose chunks go on, at a few kilobytes a second."""
    slow = [turns.take(f"slow {at}", nbytes=64 << 20) for at in range(LEAST)]
    turns.now[0] += LONGEST_S
    for turn in slow:
        turn.went_on()
    assert turns.take("other") is None
    turns.now[0] += 0.1
    for turn in slow:
        turn.went_on()
    for _ in range(5):  # what the link carries is learnt from them
        other = turns.take("other", nbytes=64 << 20)
        turns.now[0] += 0.05
        other.let_go(64 << 20)
    assert turns.held_s(64 << 20) == SHORTEST_S
    for turn in slow:  # and once they have ended, they took no more than their own turns
        turn.let_go(64 << 20)
        turn.let_go()
    held = [turns.take(f"caller {at}") for at in range(turns.limit)]
    assert all(held)
    assert turns.take("one more") is None


def test_where_the_link_is_slow_turns_last_as_long_as_it_needs(turns):
    """Also where it has become slow, and all of them lapsed before they had ended."""
    for seconds in (0.01, *[3.0] * 40):
        both = [turns.take(f"caller {at}", nbytes=20 << 20) for at in range(LEAST)]
        turns.now[0] += seconds
        for turn in both:
            turn.went_on()
        for turn in both:
            turn.let_go(20 << 20)
    both = [turns.take(f"caller {at}", nbytes=20 << 20) for at in range(LEAST)]
    turns.now[0] += 4.0
    for turn in both:
        turn.went_on()
    assert turns.take("another") is None


def test_those_who_wait_are_served_in_their_order():
    turns, served = UploadSlots(), []

    def wait(name: str) -> None:
        turn = turns.take(name, 60.0)
        assert turn is not None
        served.append(name)
        turn.let_go()

    held = [turns.take("a"), turns.take("b")]
    with ThreadPoolExecutor(3) as pool:
        for count, name in enumerate(["first", "second", "third"], 1):
            pool.submit(wait, name)
            until(lambda count=count: len(turns._waiting) == count)
        assert turns.take("late") is None  # those who wait come first
        held[0].let_go()
    assert served == ["first", "second", "third"]


def test_a_wait_for_a_turn_ends():
    turns = UploadSlots()
    held = [turns.take("a"), turns.take("b")]
    assert turns.take("c", 0.01) is None
    assert not turns._waiting
    assert all(held)
