"""Who goes first: sessions that have begun, then the oldest groups, with every manager alike."""

from __future__ import annotations

import msgpack
import pytest

from gyre.rollouts.plane.session_ledger import SessionEnded
from gyre.rollouts.plane.session_tree import SessionOutcome
from gyre.rollouts.samples import GroupRequest
from gyre.rollouts.token_log.records import request_in
from tests.sessions.session_machine import SessionWorld

EVALUATION = "evaluate/0/held_out"
ORDER = [("train", 8), ("train", 9), (EVALUATION, -2), ("train", 10), ("train", 100), ("train", 11)]
"""Neither that of their names as text, nor of their ids."""


def world_with_groups() -> SessionWorld:
    world = SessionWorld(redraws=2)
    world.attach()
    world.publish()
    for purpose, group_id in ORDER:
        world.ask_groups(purpose, [group_id], 2, min_version=0, pinned=purpose == EVALUATION)
    world.commit()
    return world


def handed_out(world: SessionWorld) -> list[tuple[str, int, int]]:
    """Purpose, group and member of every session that waits, in the order in which workers get them."""
    given = []
    while True:
        world.claim("w", 1)
        if not world.ledger.given:
            return given
        (one,) = world.ledger.given
        given.append((one.purpose, one.group_id, one.index))


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_the_oldest_groups_go_first_with_the_next_manager_too(restarts: int) -> None:
    world = world_with_groups()
    for _ in range(restarts):
        world.start()
    world.attach()
    world.ask_groups("train", [1], 2, min_version=0, pinned=False)  # after all of these
    world.commit()
    assert handed_out(world) == [(*named, index) for named in [*ORDER, ("train", 1)] for index in (0, 1)]


@pytest.mark.parametrize("restarts", [0, 1])
def test_turns_wait_in_the_order_of_their_groups(restarts: int) -> None:
    world = world_with_groups()
    world.claim("w", 99)
    world.commit()
    for claim in world.witness.claims:
        world.ask(claim, "0", [7, 8], None)
    world.commit()
    for _ in range(restarts):
        world.start()
    samples = [one.samples[0] for one in world.plane.groups.requests.values()]
    ordered = sorted(samples, key=lambda one: one.placed.order or ())
    found = [world.ledger.session_of(one.request) for one in ordered]
    named = [(one.purpose, one.group_id) for one in found if one is not None]
    assert named[::2] == named[1::2] == ORDER


@pytest.mark.parametrize("restarts", [0, 1])
def test_another_attempt_has_its_groups_place(restarts: int) -> None:
    """Its group waits for it."""
    world = world_with_groups()
    world.claim("w", 1)
    (first,) = world.ledger.given
    world.do(SessionEnded(first.id, SessionOutcome.INFRA_FAULT, None))
    world.commit()
    world.commit()
    for _ in range(restarts):
        world.start()
    assert handed_out(world)[0] == ("train", 8, 0)


def test_groups_of_before_their_numbers_were_stored_are_the_oldest() -> None:
    """A ledger of an earlier Gyre: its groups in the order of their ids, and new ones after them."""
    world = world_with_groups()
    for name, body in world.rows.sessions.items():
        if name.startswith("group/"):
            world.rows.sessions[name] = msgpack.unpackb(body)[1]
            assert isinstance(request_in(world.rows.sessions[name]), GroupRequest)
    for _ in range(2):
        world.start()
        world.attach()
        world.ask_groups("train", [1], 2, min_version=0, pinned=False)
        world.commit()
    groups = [(purpose, group_id) for purpose, group_id, index in handed_out(world) if index]
    assert groups == [(EVALUATION, -2), *(("train", id) for id in (8, 9, 10, 11, 100, 1))]
