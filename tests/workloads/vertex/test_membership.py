"""The membership: only newer announcements count, doubts last until the next incarnation, waits end at deadlines."""

from __future__ import annotations

import threading
import time

import pytest

from gyre.testing.clock import VirtualClock
from gyre.workloads.vertex.membership import DOUBT_S, Membership
from tests.waits import GENEROUS_S


def soon(delay_s=GENEROUS_S):
    return time.monotonic() + delay_s


@pytest.fixture
def membership():
    made = Membership()
    made.announce(3, {"a-0": 1, "a-1": 1, "b-0": 4}, {"a": 2, "b": 1})
    return made


@pytest.mark.parametrize("serial", [3, 2, 0])
def test_an_announcement_that_is_not_newer_changes_nothing(membership, serial):
    membership.announce(serial, {"a-0": 9}, {"a": 1})
    assert membership.members("a") == [("a-0", 1), ("a-1", 1)]
    assert membership.wanted("a") == 2


def test_listeners_hear_newer_announcements_alone(membership):
    heard = []
    membership.listen(lambda: heard.append(membership.members("b")))
    membership.announce(3, {}, {})
    membership.announce(4, {"b-0": 5}, {"b": 1})
    assert heard == [[("b-0", 5)]]


def test_members_come_in_the_order_of_their_ranks():
    made = Membership()
    made.announce(1, {f"a-{rank}": 1 for rank in (10, 2, 0)} | {"aa-1": 1, "a-b-0": 2}, {"a": 3})
    assert [vertex for vertex, _ in made.members("a")] == ["a-0", "a-2", "a-10"]
    assert made.members("a-b") == [("a-b-0", 2)]


def test_a_doubted_member_is_no_member_until_its_next_incarnation(membership):
    membership.doubt("a-1", 1)
    assert membership.members("a") == [("a-0", 1)]
    assert membership.complete("a") is None
    membership.announce(4, {"a-0": 1, "a-1": 1}, {"a": 2})
    assert membership.complete("a") is None, (
        "an announcement of the same incarnation is no proof that it lives"
    )
    membership.announce(5, {"a-0": 1, "a-1": 2}, {"a": 2})
    assert membership.complete("a") == [("a-0", 1), ("a-1", 2)]


def test_a_doubt_about_an_older_incarnation_is_ignored(membership):
    membership.doubt("b-0", 3)
    assert membership.members("b") == [("b-0", 4)]


def test_a_role_is_complete_with_every_wanted_rank(membership):
    assert membership.complete("a") == [("a-0", 1), ("a-1", 1)]
    membership.announce(4, {"a-0": 1, "a-1": 1}, {"a": 3})
    assert membership.complete("a") is None
    assert membership.complete("nobody") is None


def test_a_wait_ends_as_soon_as_the_role_is_complete(membership):
    membership.doubt("a-0", 1)
    found = []
    thread = threading.Thread(target=lambda: found.append(membership.wait_for("a", None, soon())))
    thread.start()
    membership.announce(4, {"a-0": 2, "a-1": 1}, {"a": 2})
    thread.join(GENEROUS_S)
    assert found == [[("a-0", 2), ("a-1", 1)]]


def test_a_doubt_that_nothing_confirms_passes():
    clock = VirtualClock()
    membership = Membership(clock)
    membership.announce(1, {"a-0": 1}, {"a": 1})
    membership.doubt("a-0", 1)
    assert membership.members("a") == []
    clock.advance(DOUBT_S)
    assert membership.members("a") == [("a-0", 1)]


def test_a_wait_for_a_rank_wants_a_newer_incarnation_than_a_doubted_one(membership):
    assert membership.wait_for("a", 1, soon()) == [("a-1", 1)]
    membership.doubt("a-1", 1)
    assert membership.wait_for("a", 1, soon(0.02), beyond=1) is None
    threading.Timer(0.02, lambda: membership.announce(4, {"a-1": 2}, {"a": 2})).start()
    assert membership.wait_for("a", 1, soon(), beyond=1) == [("a-1", 2)]


@pytest.mark.parametrize("rank", [None, 0])
def test_a_wait_ends_at_its_deadline(rank):
    deadline = soon(0.05)
    assert Membership().wait_for("a", rank, deadline) is None
    assert time.monotonic() >= deadline


def test_an_announcement_between_the_look_and_the_wait_is_not_missed(monkeypatch):
    """The look is held up until somebody else has announced, or would have if the look did not hold the lock."""
    announced = threading.Event()

    class Slow(Membership):
        def complete(self, role):
            found = super().complete(role)
            if found is None and not announced.is_set():
                threading.Thread(target=self._tell).start()
                announced.wait(0.05)
            return found

        def _tell(self):
            self.announce(1, {"a-0": 1}, {"a": 1})
            announced.set()

    monkeypatch.setattr(
        "gyre.workloads.vertex.membership.DOUBT_S", 10 * GENEROUS_S
    )  # nor is it found by looking again
    deadline = soon()
    assert Slow().wait_for("a", None, deadline) == [("a-0", 1)]
    assert time.monotonic() < deadline, "it was found by looking once more at the end"
