"""Groups that begin with more sessions than are trained: the first that end are, and the others are cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import ConfigError
from gyre.rollouts.plane.session_tree import SessionOutcome
from tests.rollouts.plane import ScriptedAgent
from tests.sessions.session_machine import SessionWorld
from tests.sessions.session_plane import SessionPlane, drawn, session_plane

PROMPT = [7, 8]


async def _ended(plane: SessionPlane, agent: ScriptedAgent, session: dict[str, Any], tokens: int) -> None:
    turn = plane.turning(session, PROMPT)
    await drawn(agent, tokens)
    await turn
    assert (await plane.end(session, reward=float(tokens)))[0] == 200


async def test_the_first_that_end_are_trained_and_the_others_discarded(tmp_path: Path) -> None:
    async with session_plane(tmp_path, oversample=1.5) as plane:
        trainer = await plane.asked([0], n=2)
        agent = await plane.working("a")
        sessions = await plane.claim(most=8)
        assert [one["index"] for one in sessions] == [0, 1, 2]
        slow = plane.turning(sessions[0], PROMPT)
        (sample,) = await agent.work(1)
        await agent.report({sample.work.row: 50})
        await _ended(plane, agent, sessions[2], 4)
        await _ended(plane, agent, sessions[1], 6)
        group = (await trainer.groups(1))[0]
        assert sorted(row.reward or 0.0 for row in group.samples) == [4.0, 6.0]
        assert {row.rollout for row in group.samples} == {0, 1}
        assert (await slow)[0] in (404, 410), "its agent is told at once"
        _, told = await plane.post("/v1/sessions/beat", {"worker": "w", "sessions": [sessions[0]["id"]]})
        assert told["lost"] == [sessions[0]["id"]]
        assert plane.manager.groups.account.discarded["oversampled"] == 50
        lengths = plane.ledger.status()["oversampled"]
        assert (lengths["groups"], lengths["trained"]["sessions"], lengths["drawn"]["sessions"]) == (1, 2, 3)
        assert (lengths["trained"]["tokens"], lengths["drawn"]["tokens"]) == (5.0, 20.0)
        plane.exact()


async def test_a_manager_that_dies_delivers_the_same_sessions_again(tmp_path: Path) -> None:
    async with session_plane(tmp_path, oversample=2.0) as plane:
        trainer = await plane.asked([0], n=1)
        agent = await plane.working("a")
        first, second = await plane.claim(most=8)
        await _ended(plane, agent, second, 3)
        before = (await trainer.groups(1))[0]
        assert (await plane.end(first))[0] == 404
        await plane.settled()
        await plane.kill()
        await plane.start()
        assert set(plane.ledger.sessions) == {second["id"]}
        trainer = await plane.trainer(term=2)
        await trainer.ask([0], n=1)
        after = (await trainer.groups(1))[0]
        assert [row.token_ids.tolist() for row in after.samples] == [
            row.token_ids.tolist() for row in before.samples
        ]
        plane.exact()


async def test_two_that_end_at_once_are_chosen_by_their_places(tmp_path: Path) -> None:
    """Not by how long they are."""
    async with session_plane(tmp_path, oversample=2.0, urgent_commit_s=0.2) as plane:
        trainer = await plane.asked([0], n=1)
        agent = await plane.working("a")
        sessions = await plane.claim(most=8)
        turns = []
        for session, tokens in zip(sessions, (9, 2), strict=True):
            turns.append(plane.turning(session, PROMPT))
            await drawn(agent, tokens)
        await asyncio.gather(*turns)
        both = await asyncio.gather(*(plane.end(session) for session in reversed(sessions)))
        assert [status for status, _ in both] == [200, 200]
        (row,) = (await trainer.groups(1))[0].samples
        assert len(row.token_ids) == 9
        plane.exact()


async def test_an_evaluation_has_no_more_than_are_asked_for(tmp_path: Path) -> None:
    async with session_plane(tmp_path, oversample=3.0) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        await trainer.ask([-1], purpose="evaluate/0/default", min_version=0, pinned=True, n=2)
        assert len(await plane.claim(most=8)) == 2


@pytest.mark.parametrize("oversample", [0.5, 5.0])
def test_what_is_no_share_is_refused(oversample: float) -> None:
    from gyre.config.sections import WorkloadSettings

    with pytest.raises(ConfigError, match="oversample"):
        WorkloadSettings.read({"agent": {"function": "a:b", "oversample": oversample}})


async def test_a_group_is_complete_without_one_that_has_had_its_attempts(tmp_path: Path) -> None:
    async with session_plane(tmp_path, oversample=1.5, redraws=0) as plane:
        await plane.asked([0], n=2)
        agent = await plane.working("a")
        first, spare, last = await plane.claim(most=8)
        assert (await plane.end(spare, "infra_fault"))[0] == 200
        await plane.settled()
        await plane.kill()
        await plane.start()
        await agent.back()
        trainer = await plane.trainer(term=2)
        await trainer.ask([0], n=2)
        await _ended(plane, agent, first, 4)
        await _ended(plane, agent, last, 6)
        group = (await trainer.groups(1))[0]
        assert [row.reward for row in group.samples] == [4.0, 6.0]
        plane.exact()


def test_a_group_fails_that_has_too_few_left() -> None:
    world = SessionWorld(oversample=1.5, redraws=0)
    world.attach()
    world.publish()
    world.ask_groups("train", [0], 2, min_version=0, pinned=False)
    world.commit()
    world.claim("w", 3)
    world.commit()
    first, spare, last = world.witness.claims
    world.end(spare, SessionOutcome.INFRA_FAULT, 0.0)
    world.commit()
    assert world.check_fold()
    assert not world.witness.failed
    assert set(world.ledger.sessions) == {first.session, last.session}
    world.end(last, SessionOutcome.INFRA_FAULT, 0.0)
    world.commit()
    assert world.check_fold()
    assert world.witness.failed == {("train", 0)}
