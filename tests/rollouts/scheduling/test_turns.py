"""Where the turns of agents go: to what their prompts begin with, as long as that is worth it."""

from __future__ import annotations

import random

import pytest

from gyre.rollouts.scheduling.fleet import Prefix
from gyre.rollouts.scheduling.routing_settings import RoutingSettings
from tests.rollouts.scheduling.routed_fleet import RoutedFleet

LIMIT = 256
"""With nothing learnt, a turn of this limit is expected to get 128 tokens."""


def fleet(instances: int = 2, *, slots: int = 8, **settings: float) -> RoutedFleet:
    found = RoutedFleet(settings=RoutingSettings(**{"overcommit": 0.0, **settings}))  # type: ignore[arg-type]
    for index in range(instances):
        found.join(f"i{index}", max_running=slots, kv_tokens=10**6, rate_tokens_s=100.0 * slots)
        found.serve(f"i{index}", 0)
    return found


def turn(
    to: RoutedFleet,
    key: int,
    home: str = "",
    *,
    tokens: int = 1000,
    version: int = 0,
    session: int = 0,
    number: int = 0,
) -> None:
    to.submit(
        key,
        group=key,
        prompt_tokens=tokens + 72,
        done_tokens=0,
        max_new_tokens=LIMIT,
        order=(session, -number),
        prefix=Prefix(home, version, tokens) if home else None,
    )


def fill(found: RoutedFleet, name: str, count: int, first: int = 100) -> None:
    for key in range(first, first + count):
        turn(found, key)
        found.place(key, name)


def test_a_turn_goes_where_its_prefix_is_though_others_have_less_to_do() -> None:
    found = fleet()
    fill(found, "i1", 2)
    turn(found, 0, "i1")
    turn(found, 1)
    assert dict(found.assign()) == {0: "i1", 1: "i0"}


@pytest.mark.parametrize("what", ["full", "gone", "drains", "other weights", "unknown"])
def test_an_instance_that_cannot_have_it_is_no_home(what: str) -> None:
    found = fleet()
    home = "nobody" if what == "unknown" else "i1"
    if what == "full":
        fill(found, "i1", 8)
    elif what == "gone":
        found.leave("i1")
    elif what == "drains":
        found.admit("i1", False)
    elif what == "other weights":
        found.serve("i1", 1)
        fill(found, "i1", 1)
    turn(found, 0, home)
    assert found.assign() == [(0, "i0")]


def test_nobody_waits_for_a_home_that_lacks_room() -> None:
    found = fleet(slots=2)
    fill(found, "i1", 2)
    fill(found, "i0", 1, first=200)
    turn(found, 0, "i1")
    turn(found, 1, "i1")
    assert found.assign() == [(0, "i0")]
    assert found.queued() == 1
    found.finished(100, 10)
    assert found.assign() == [(1, "i1")]


@pytest.mark.parametrize(("tokens", "expected"), [(100, "i0"), (50_000, "i1")])
def test_what_is_read_again_is_weighed_against_what_all_lose_by_staying(tokens: int, expected: str) -> None:
    """At a hundred tokens' worth of ten, a home with seven samples more is left; at 5,000 it is not."""
    found = fleet()
    fill(found, "i1", 7)
    turn(found, 0, "i1", tokens=tokens)
    assert found.assign() == [(0, expected)]


def test_a_slot_that_comes_soon_is_waited_for_where_the_prefix_is_long() -> None:
    for tokens, expected in ((500, "i0"), (100_000, "i1")):
        found = fleet(overcommit=0.25)
        fill(found, "i1", 8)
        turn(found, 0, "i1", tokens=tokens)
        assert found.assign() == [(0, expected)]
        assert found.deal(0.0) == [], "it is not moved to the free slot that it was not given"


def test_rebalancing_moves_no_turn_for_a_little() -> None:
    """Turns end soon: what reading a prefix again costs is not won back in what is left of one."""
    found = fleet()
    for key in range(6):
        turn(found, key, "i1", tokens=5000)
    found.assign()
    assert len(found.held_by("i1")) == 6
    for at in range(10):
        assert found.deal(at / 10) == []
        assert found.rebalance(at / 10 + 0.05) == []


def test_the_oldest_group_goes_first_and_in_it_the_session_that_is_farthest() -> None:
    """Whoever asked first: the oldest group is trained first, and waits for its last session."""
    found = fleet(1, slots=1)
    fill(found, "i0", 1)
    turn(found, 0, session=7, number=5)
    turn(found, 1, session=3, number=0)
    turn(found, 2, session=3, number=4)
    turn(found, 3, session=3, number=4)
    order = []
    found.finished(100, 10)
    while found.queued():
        (given,) = found.assign()
        order.append(given.sample)
        found.finished(given.sample, 10)
    assert order == [2, 3, 1, 0]


def test_sessions_stay_where_they_began_over_many_turns() -> None:
    """Four instances of 16 slots, 48 sessions of eight turns with tools between them, in virtual time."""
    found = fleet(4, slots=16, overcommit=0.06)
    generator = random.Random(1)
    at, done, moved, turns = dict.fromkeys(range(48), ""), dict.fromkeys(range(48), 0), 0, 0
    due = {session: generator.expovariate(2.0) for session in range(48)}
    ends: dict[int, float] = {}
    now = 0.0
    while due or ends:
        now += 0.05
        for session in [one for one, end in ends.items() if end <= now]:
            del ends[session]
            found.finished(session, 128)
            done[session] += 1
            if done[session] < 8:
                due[session] = now + generator.lognormvariate(-0.7, 0.8)
        for session in [one for one, when in due.items() if when <= now]:
            del due[session]
            turn(
                found,
                session,
                at[session],
                tokens=200 * done[session],
                session=session // 8,
                number=done[session],
            )
        for session, name in found.assign():
            turns += bool(at[session])
            moved += bool(at[session]) and at[session] != name
            at[session] = name
            ends[session] = now + 128 / 100
        assert not found.deal(now)
    assert turns == 48 * 7
    assert moved <= turns * 0.05, f"{moved} of {turns} turns went away from their prefix"
