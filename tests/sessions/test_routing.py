"""Where turns run, by which version, and what the trainer hears of sessions between two turns."""

from __future__ import annotations

import msgspec

from gyre.rollouts.protocol.frames import SampleCounts, TrainerStatus
from tests.rollouts.plane import ScriptedTrainer
from tests.sessions.session_plane import SessionPlane, drawn

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
