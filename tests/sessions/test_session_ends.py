"""Ends that leave nothing to train on, or come together with others of their group."""

from __future__ import annotations

from typing import Any

from gyre.rollouts.plane.session_ledger import SessionEnded
from gyre.rollouts.plane.session_tree import SessionOutcome
from gyre.rollouts.samples import VersionRun
from gyre.rollouts.session_extras import row_turns
from gyre.workloads.trainer.learning.session_metrics import session_metrics
from tests.sessions.session_machine import SessionWorld
from tests.sessions.session_plane import SessionPlane, drawn

PROMPT = [7, 8]


def test_a_manager_that_dies_as_several_of_a_group_end_fails_the_group() -> None:
    """The first of them has had all of its attempts, the other has not."""
    world = SessionWorld(redraws=1)
    world.attach()
    world.publish()
    world.ask_groups("train", [0], 2, min_version=0, pinned=False)
    world.commit()
    world.claim("w", 2)
    world.commit()

    def fault(index: int) -> None:
        claim = [one for one in world.witness.claims if one.index == index][-1]
        world.do(SessionEnded(claim.session, SessionOutcome.INFRA_FAULT, None, "gone", {}, claim.number))

    fault(0)
    world.commit()
    world.claim("w", 1)
    world.commit()
    fault(0)
    fault(1)
    world.begin_commit()
    assert world.batch is not None
    world.rows.commit(world.batch)
    world.start()
    world.attach()
    world.ask_groups("train", [0], 2, min_version=0, pinned=False)
    assert world.witness.failed == {("train", 0)}
    assert not world.ledger.sessions
    world.commit()
    assert world.check_fold()


async def test_a_turn_of_no_token_takes_nothing_from_those_before_it(plane: SessionPlane) -> None:
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    await drawn(agent, 3)
    await first
    empty = plane.turning(session, [*PROMPT, 1, 2, 3, 40])
    (sample,) = await agent.work(1)
    await agent.report({}, {sample.work.row: "stop"})
    assert (await empty)[0] == 200
    assert (await plane.end(session))[0] == 200
    (row,) = (await trainer.groups(1))[0].samples
    assert row.token_ids.tolist() == [1, 2, 3]


async def test_what_goes_on_after_a_turn_of_no_token_is_one_row(plane: SessionPlane) -> None:
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    empty = plane.turning(session, PROMPT)
    (sample,) = await agent.work(1)
    await agent.report({}, {sample.work.row: "length"})
    await empty
    second = plane.turning(session, [*PROMPT, 40])
    await drawn(agent, 2)
    await second
    await plane.end(session)
    group = (await trainer.groups(1))[0]
    (row,) = group.samples
    assert (group.prompt_ids.tolist(), row.token_ids.tolist()) == ([*PROMPT, 40], [1, 2])
    assert [turn[:4] for turn in row_turns(row)] == [(0, 0, 0, 0), (1, 0, 0, 2)]
    assert session_metrics([group])["tokens_not_drawn"] == 0


async def test_what_is_put_after_a_turn_of_no_token_has_the_version_of_the_turn_that_it_precedes(
    plane: SessionPlane,
) -> None:
    trainer = await plane.asked([0], n=2)
    agent = await plane.working("a")
    one, other = await plane.claim()

    async def turn(session: dict[str, Any], ids: list[int], tokens: int) -> None:
        asked = plane.turning(session, ids)
        (sample,) = await agent.work(1)
        row = sample.work.row
        await agent.report({row: tokens} if tokens else {}, {row: "stop"})
        assert (await asked)[0] == 200

    await turn(one, PROMPT, 3)
    await turn(one, [*PROMPT, 1, 2, 3, 40], 0)
    await turn(one, [*PROMPT, 1, 2, 3, 40, 41], 2)
    await turn(other, [7, 9, 10], 0)
    await turn(other, [7, 9, 10, 11], 2)
    await plane.end(one)
    await plane.end(other)
    group = (await trainer.groups(1))[0]
    assert group.prompt_ids.tolist() == [7]
    told = [(row.token_ids.tolist(), row.mask.tolist(), row.versions) for row in group.samples]
    drawn_before, nothing, drawn_after = [False] + 3 * [True], 2 * [False], 2 * [True]
    assert told == [
        (
            [8, 1, 2, 3, 40, 41, 1, 2],
            drawn_before + nothing + drawn_after,
            (VersionRun(0, 0, 4), VersionRun(0, 4, 8)),
        ),
        ([9, 10, 11, 1, 2], 3 * [False] + drawn_after, (VersionRun(0, 0, 5),)),
    ]


async def test_a_session_of_no_token_is_drawn_again(plane: SessionPlane) -> None:
    await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    empty = plane.turning(session, PROMPT)
    (sample,) = await agent.work(1)
    await agent.report({}, {sample.work.row: "stop"})
    await empty
    assert (await plane.end(session))[1]["outcome"] == "infra_fault"
    (again,) = await plane.claim()
    assert (again["group"], again["attempt"]) == (0, 1)
    plane.exact()


def test_the_same_end_of_a_session_without_a_turn_is_answered_the_same() -> None:
    world = SessionWorld()
    world.attach()
    world.publish()
    world.ask_groups("train", [0], 1, min_version=0, pinned=False)
    world.claim("w", 1)
    (claim,) = world.witness.claims
    for _ in range(2):
        world.do(SessionEnded(claim.session, SessionOutcome.SCORED, 1.0, "done", {}, claim.number))
        assert world.ledger.sessions[claim.session].outcome is SessionOutcome.INFRA_FAULT
