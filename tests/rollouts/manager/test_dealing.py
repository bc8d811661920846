"""A step's samples go to whoever is ready first, and move to the others as they come, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.rollouts.protocol.frames import Cancel, Weights
from tests.rollouts.plane import Plane, ScriptedAgent, ScriptedTrainer, live_plane, until


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with live_plane(tmp_path) as plane:
        yield plane


async def two_agents(plane: Plane) -> tuple[ScriptedTrainer, ScriptedAgent, ScriptedAgent]:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agents = [ScriptedAgent(plane, name) for name in ("a", "b")]
    for agent in agents:
        await agent.dial(max_running=64, kv_tokens=1 << 20)
        await agent.load()
    await trainer.publish(1)
    return trainer, *agents


async def test_who_loads_later_gets_its_share_and_no_token_is_lost(plane: Plane) -> None:
    trainer, first, second = await two_agents(plane)
    await trainer.ask(range(8), n=8, limit=4000, min_version=1)
    weights = await first.wire.expect(Weights)
    await first.loaded(weights)
    await first.work(64)
    await first.report(dict.fromkeys(list(first.samples)[40:], 3))
    await until(lambda: plane.manager.groups.account.generated == 24 * 3)
    await second.loaded(await second.wire.expect(Weights))
    recalled = await first.wire.expect(Cancel)
    assert 28 <= len(recalled.rows) <= 34
    moved = [first.samples[row].work.key for row, _ in recalled.rows]
    await first.report({}, {row: "released" for row, _ in recalled.rows})
    got = await second.work(len(moved))
    assert sorted(one.work.key for one in got) == sorted(moved)
    assert {len(one.tokens) for one in got} == {0, 3}, "each from its last token"
    for agent in (first, second):
        rows = list(agent.samples)
        await agent.report(
            {row: 4000 - len(agent.samples[row].tokens) for row in rows}, dict.fromkeys(rows, "length")
        )
    groups = await trainer.groups(8)
    assert {len(sample.token_ids) for group in groups.values() for sample in group.samples} == {4000}
    assert plane.manager.groups.missing_tokens() == 0


async def test_nothing_is_kept_for_one_that_dies_while_it_loads(plane: Plane) -> None:
    trainer, first, second = await two_agents(plane)
    await trainer.ask(range(8), n=8, limit=4000, min_version=1)
    await first.loaded(await first.wire.expect(Weights))
    await first.work(64)
    await second.wire.expect(Weights)
    await second.wire.socket.close()
    await until(lambda: "b" not in plane.manager.groups.instances)
    assert len(plane.manager.groups.instances["a"].counted) == 64
