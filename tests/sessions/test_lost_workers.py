"""A session whose workers die one after another, wherever it goes on: it may be what kills them. Time is virtual."""

from __future__ import annotations

import pytest

from gyre.config.spec import FailoverSpec
from gyre.rollouts.plane.session_ledger import MOST_LOSSES
from tests.sessions.session_machine import SILENCE_S, SessionWorld
from tests.sessions.session_plane import SessionPlane

RECOVERIES = ("replayable", "snapshot", "restart")


def world_of(recovery: str) -> SessionWorld:
    """A job with one session, which infrastructure may end once."""
    world = SessionWorld(recovery=recovery, redraws=0)
    world.attach()
    world.publish()
    world.commit()
    world.ask_groups("train", [0], 1, min_version=0, pinned=False)
    world.commit()
    return world


def lose_worker(world: SessionWorld, turns: int) -> None:
    """Whoever claims the session has so many turns of it, and is not heard any more."""
    world.dial("a")
    world.load("a")
    world.claim("w", 1)
    world.commit()
    claim = world.witness.claims[-1]
    assert claim.number == world.ledger.sessions[claim.session].claim, "nobody was given it"
    for turn in range(turns):
        key = f"{turn:x}-0"
        assert not world.ask(claim, key, [40], f"{turn - 1:x}-0" if turn else None)
        world.draw("a", 14)
        world.commit()
    assert len(world.ledger.sessions[claim.session].turns) >= turns
    world.pass_time(SILENCE_S + 1)
    world.commit()


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_what_kills_each_worker_at_the_same_turn_is_ended(recovery: str) -> None:
    """Also where each attempt begins without turns, so that the next one has as many as the one before."""
    world = world_of(recovery)
    for _ in range(MOST_LOSSES):
        lose_worker(world, 1)
        assert not world.witness.failed
    lose_worker(world, 1)
    assert world.witness.failed == {("train", 0)}
    (fault,) = (fields for kind, fields in world.events if kind == "SessionFault")
    assert f"{MOST_LOSSES + 1} workers were lost in a row" in fault["reason"]


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_one_that_gets_further_is_no_killer(recovery: str) -> None:
    world = world_of(recovery)
    for turns in [1] * MOST_LOSSES + [2] + [1] * (MOST_LOSSES - 1):
        lose_worker(world, turns)
    assert not world.witness.failed
    lose_worker(world, 1)
    assert world.witness.failed


def test_a_session_ends_before_it_has_used_up_its_vertex() -> None:
    """With the default budgets one session that ends its process cannot end the job."""
    restarts = FailoverSpec().vertex.most_attempts
    assert restarts >= MOST_LOSSES + 1


async def test_what_a_worker_gives_back_is_handed_out_at_once(plane: SessionPlane) -> None:
    await plane.asked([0], n=2)
    kept, given = await plane.claim()
    name = given["path"].removeprefix("/s/")
    beat = {"worker": "w", "sessions": [kept["id"]], "back": [f"{kept['id']}.1", name]}
    assert await plane.post("/v1/sessions/beat", beat) == (200, {"lost": []})
    (again,) = await plane.claim("v", wait_s=5.0)
    assert again["id"] == given["id"]
    assert (await plane.post("/v1/sessions/beat", {**beat, "back": name}))[0] == 422
