"""Where turns run, by which version, and what the trainer hears of sessions between two turns."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gyre.rollouts.plane import session_workers
from gyre.rollouts.protocol.frames import Failed, SampleCounts, TrainerStatus
from tests.rollouts.plane import ScriptedTrainer, until, within
from tests.sessions.session_plane import SessionPlane, drawn, ids_of, session_plane

PROMPT = [7, 8]


async def _underway(trainer: ScriptedTrainer) -> dict[str, int]:
    await trainer.wire.send(TrainerStatus(at_s=0.0, waited_s=0.0, wanted={"rollout": 1}))
    told = msgspec.structs.asdict(await trainer.wire.expect(SampleCounts))
    return {what: count for what, count in told.items() if count}


async def test_the_trainer_hears_how_many_sessions_are_with_their_agents(plane: SessionPlane) -> None:
    trainer = await plane.asked([0], n=3)
    agent = await plane.working("a")
    assert await _underway(trainer) == {"for_agent": 3}
    mine = await plane.claim(most=2)
    assert await _underway(trainer) == {"for_agent": 1, "with_agent": 2}
    turn = plane.turning(mine[0], PROMPT)
    (sample,) = await agent.work(1)
    plane.manager.links["a"].running = 1  # as it reports every quarter of a second
    assert await _underway(trainer) == {"generating": 1, "for_agent": 1, "with_agent": 1}
    await agent.report({sample.work.row: 2}, {sample.work.row: "stop"})
    await turn
    plane.manager.links["a"].running = 0
    assert await _underway(trainer) == {"for_agent": 1, "with_agent": 2}
    await plane.end(mine[0])
    assert await _underway(trainer) == {"for_agent": 1, "with_agent": 1}


async def test_a_turn_goes_to_the_instance_that_drew_its_parent(plane: SessionPlane) -> None:
    """And where that one is gone, to another, which goes on with all the tokens."""
    await plane.asked([0])
    first = await plane.working("a")
    (session,) = await plane.claim()
    turn = plane.turning(session, PROMPT)
    path = [*PROMPT, *await drawn(first, 3)]
    await turn
    second = await plane.working("b")
    for number in range(3):
        turn = plane.turning(session, [*path, 50 + number])
        path += [50 + number, *await drawn(first, 2)]
        assert ids_of((await turn)[1]) == [1, 2], "it went to b, which has less to do"
    await first.wire.socket.close()
    await until(lambda: "a" not in plane.manager.groups.instances)
    turn = plane.turning(session, [*path, 60])
    await drawn(second, 1)
    assert ids_of((await turn)[1]) == [1]
    assert (await plane.end(session))[0] == 200


async def test_other_weights_have_no_prefix(plane: SessionPlane) -> None:
    """A turn after an update goes wherever there is least to do: nobody's keys and values are of these weights."""
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    turn = plane.turning(session, PROMPT)
    path = [*PROMPT, *await drawn(agent, 3)]
    await turn
    await trainer.publish(1)
    agent.weights = None
    await agent.load()
    await until(lambda: plane.manager.groups.instances["a"].version == 1)
    turn = plane.turning(session, [*path, 9])
    (sample,) = await agent.work(1)
    placed = plane.manager.groups.sample(sample.work.key)
    assert placed is not None
    assert placed.placed.prefix is not None
    assert not plane.manager.groups.instances["a"].has_prefix_of(placed.placed)
    await agent.report({sample.work.row: 1}, {sample.work.row: "stop"})
    await turn


async def test_an_evaluation_is_answered_by_its_version_whatever_is_published(plane: SessionPlane) -> None:
    """In every turn, though newer ones come while its tool runs; they wait until it is over, and no longer."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([-1], purpose="evaluate/0/default", min_version=0, pinned=True)
    await trainer.ask([5], min_version=1)
    sessions = await plane.claim(most=1)
    (session,) = [one for one in sessions if one["purpose"] == "evaluate/0/default"]
    path = list(PROMPT)
    for number in range(3):
        turn = plane.turning(session, path)
        path += await drawn(agent, 2)
        await turn
        path.append(70 + number)
        await trainer.publish(number + 1)  # while the tool runs
        await plane.settled()
        assert plane.manager.groups.served_version == 0
    assert plane.manager.versions.newest == 3
    assert (await plane.end(session))[0] == 200
    group = (await trainer.groups(1, "evaluate/0/default"))[-1]
    assert {run.version for row in group.samples for run in row.versions} == {0}
    await until(lambda: plane.manager.groups.served_version == 3)
    (other,) = await plane.claim()
    assert other["group"] == 5
    plane.exact()


async def test_a_publish_waits_for_an_evaluation_no_longer_than_a_session_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that lives and never ends its session holds a version back for `config.agent.seconds`."""
    monkeypatch.setattr(session_workers, "ENDED_WITHIN_S", 0.1)
    async with session_plane(tmp_path, seconds=0.6, redraws=0) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        await plane.working("a")
        await trainer.ask([-1], purpose="evaluate/0/default", min_version=0, pinned=True)
        (session,) = await plane.claim()
        await trainer.publish(1)
        await until(lambda: plane.manager.versions.durable == 1)
        assert plane.manager.groups.served_version == 0
        with within(5.0):
            await until(lambda: plane.manager.groups.served_version == 1)
        assert (await trainer.wire.expect(Failed)).ids == [-1]
        assert (await plane.turn(session, PROMPT))[0] in (404, 410)
