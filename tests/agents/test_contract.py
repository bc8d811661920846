"""The client and the runner against the real rollout manager, its sockets and its ledger. Engines draw by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.agents import PolicyFault, Session
from gyre.agents.calculator import ALPHABET, Calculator
from gyre.agents.client import SessionClient
from gyre.agents.runner import SessionRunner, agent_of, keep_beating
from gyre.chat.plain import PlainRenderer
from gyre.rollouts.protocol.frames import Request
from gyre.rollouts.samples import Group, pack_groups
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.agents.test_runner import settings_of
from tests.rollouts.plane import ScriptedAgent, until
from tests.sessions.session_plane import SessionPlane, session_plane

TOKENIZER = CharTokenizer(ALPHABET)
TASK = {"problem": "12*34*5=", "answer": "02040"}


@asynccontextmanager
async def worker(plane: SessionPlane, found: Any, name: str = "agent-0") -> AsyncIterator[SessionRunner]:
    """A worker of the real manager; it dies at the end of the block, and hands nothing back."""
    client = SessionClient(lambda: (plane.url, "secret"), worker=name)
    settings = settings_of(found)
    runner = SessionRunner(client, agent_of(found, settings, {}), settings)
    tasks = [
        asyncio.create_task(runner.run()),
        asyncio.create_task(keep_beating(client, lambda: runner.held, runner.lose)),
    ]
    try:
        yield runner
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await client.close()


async def draws(agent: ScriptedAgent, text: str) -> None:
    """The engine draws this text for its next sample; one that is no call ends."""
    (sample,) = await agent.work(1)
    end = [] if text.endswith("]") else [TOKENIZER.eos_id]
    await agent.say(sample.work.row, [*TOKENIZER.encode(text).tolist(), *end])


def written(group: Group) -> str:
    (row,) = group.samples
    return TOKENIZER.decode(np.concatenate([group.prompt_ids, row.token_ids]))


@asynccontextmanager
async def plane_with(
    tmp_path: Path, **settings: Any
) -> AsyncIterator[tuple[SessionPlane, Any, ScriptedAgent]]:
    async with session_plane(tmp_path, renderer=PlainRenderer(TOKENIZER), **settings) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        group = Group(0, np.array([1, 4, 5], np.int32), TASK)
        limits = {"max_new_tokens": 12}
        asked = Request(
            purpose="train", groups=pack_groups([group]), n=1, sampling=limits, seed=3, min_version=0
        )
        await trainer.wire.send(asked)
        yield plane, trainer, await plane.working("a")


async def test_an_environment_is_played_to_its_end_and_its_group_is_delivered(tmp_path: Path) -> None:
    async with plane_with(tmp_path) as (plane, trainer, agent), worker(plane, Calculator):
        for text in ("[12*34]", "[0408*5]", "02040"):
            await draws(agent, text)
        group = (await trainer.groups(1))[0]
        assert written(group) == "12*34*5=[12*34]:0408:[0408*5]:02040:02040"
        (row,) = group.samples
        assert row.mask is not None
        assert (TOKENIZER.decode(row.token_ids[row.mask]), row.reward) == ("[12*34][0408*5]02040", 1.0)
        plane.exact()


async def test_another_worker_gets_the_turns_that_were_drawn(tmp_path: Path) -> None:
    async with plane_with(tmp_path, worker_silence_s=1.0) as (plane, trainer, agent):
        async with worker(plane, Calculator):
            for text in ("[12*34]", "[0408*5]"):
                await draws(agent, text)
            await until(lambda: len(next(iter(plane.ledger.sessions.values())).turns) == 3)
        async with worker(plane, Calculator, "agent-1"):
            await draws(agent, "02040")
            group = (await trainer.groups(1))[0]
        assert written(group) == "12*34*5=[12*34]:0408:[0408*5]:02040:02040"
        assert group.samples[0].reward == 1.0
        plane.exact()


async def faults(session: Session) -> float:
    await session.chat([{"role": "user", "content": "1*1="}])
    raise PolicyFault("no product")


async def too_long(session: Session) -> float:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1*1="}]
    while True:
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("found", "limits", "outcome"),
    [
        (faults, {}, "policy_fault"),
        (too_long, {"max_turns": 1}, "truncated"),
        (too_long, {"max_tokens": 9}, "truncated"),
    ],
)
async def test_ends_that_are_no_score(
    tmp_path: Path, found: Any, limits: dict[str, int], outcome: str
) -> None:
    async with plane_with(tmp_path, **limits) as (plane, trainer, agent), worker(plane, found) as runner:
        await draws(agent, "1")
        (row,) = (await trainer.groups(1))[0].samples
        assert row.reward == 0.0
        assert row.finish_reason == ("length" if outcome == "truncated" else "stop")
        await until(lambda: runner.counts.ended[outcome] == 1)


async def test_token_ids_are_asked_for_without_messages(tmp_path: Path) -> None:
    async def by_tokens(session: Session) -> float:
        first = await session.generate(session.prompt_ids)
        path = [*session.prompt_ids, *first.token_ids, 9]
        second = await session.generate(path, max_new_tokens=4)
        assert len(second.logprobs) == len(second.token_ids)
        return float(len(first.token_ids) + len(second.token_ids))

    async with plane_with(tmp_path) as (plane, trainer, agent), worker(plane, by_tokens):
        await draws(agent, "12")
        await draws(agent, "3")
        (row,) = (await trainer.groups(1))[0].samples
        assert row.reward == 5.0
        assert row.token_ids.tolist() == [4, 5, 2, 9, 6, 2]
        assert row.mask is not None
        assert row.mask.tolist() == [True, True, True, False, True, True]
        plane.exact()
