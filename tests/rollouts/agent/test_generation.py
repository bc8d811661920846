"""Samples that wait for their batch of prompts: the engine does not know them, and none is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gyre.engines.dialect import GenerateRequest, StreamChunk
from gyre.rollouts.agent.generation import Generation, with_prompts
from gyre.rollouts.agent.prompt_batching import PromptBatching
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Assign, Assignment, Keep, Prompt
from tests.rollouts.plane import until

PASS_S = 0.02


class SilentEngine:
    """Takes requests, and draws no token of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.chunk_tokens: list[int] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        self.asked.append(request.rid)
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def generate_many(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        self.asked += [request.rid for request in requests]
        self.chunk_tokens += [request.chunk_tokens for request in requests]
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)


class Owner:
    version = 0

    def __init__(self) -> None:
        self.tasks: list[asyncio.Future[Any]] = []

    def spawn(self, work: Awaitable[Any]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    def report_soon(self) -> None:
        pass


@pytest.fixture
def engine() -> SilentEngine:
    return SilentEngine()


@pytest.fixture
async def generation(engine: SilentEngine) -> Any:
    """Two slots, which three samples want: the third waits."""
    owner = Owner()
    host: Any = SimpleNamespace(
        client=engine, loader=None, counts_from=-1, adapter="", reads_apart=True, sick=""
    )
    made = Generation(host, owner, clock=time)
    made.batching = PromptBatching(2)
    made.batching.stepped(PASS_S)
    made.batching.passed(PASS_S)
    made.begin([given(key) for key in (1, 2, 3)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    yield made
    made.end_all("released", "the test is over")
    for task in owner.tasks:
        task.cancel()
    await asyncio.gather(*owner.tasks, return_exceptions=True)


def given(key: int) -> tuple[Assignment, Prompt]:
    work = Assignment(key=key, row=key, request_id=key, lease=key, seed=key, prior=b"")
    return work, Prompt(request_id=key, tokens=b"\1\0\0\0", sampling={"max_new_tokens": 8})


async def test_a_sample_without_a_slot_is_not_sent(generation: Generation, engine: SilentEngine) -> None:
    await asyncio.sleep(3 * PASS_S)
    assert [int(rid) for rid in engine.asked] == [1, 2]


async def test_it_is_sent_when_the_free_slot_was_idle_for_long_enough(
    generation: Generation, engine: SilentEngine
) -> None:
    generation.finish(generation.samples[1], "stop", "")
    assert len(engine.asked) == 2, "the other would stand still for it"
    await until(lambda: len(engine.asked) == 3)


async def test_what_is_recalled_before_it_was_sent_costs_the_engine_nothing(
    generation: Generation, engine: SilentEngine
) -> None:
    await generation.recall(generation.samples[3])
    assert generation.samples[3].end == "released"
    assert engine.aborted == []


async def test_an_engine_dies_with_what_it_had_and_not_with_what_waited(generation: Generation) -> None:
    generation.end_all("died", "the engine died")
    assert [generation.samples[key].end for key in (1, 2, 3)] == ["died", "died", "released"]


async def test_what_waits_is_sent_when_a_new_manager_drops_the_others(
    generation: Generation, engine: SilentEngine
) -> None:
    generation.keep([Keep(key=3, row=0, lease=9, known=0, lineage="")])
    assert list(generation.samples) == [9]
    await until(lambda: len(engine.asked) == 3)


async def test_nothing_is_sent_after_the_end(generation: Generation, engine: SilentEngine) -> None:
    generation.is_closed = True
    generation.finish(generation.samples[1], "stop", "")
    await asyncio.sleep(3 * PASS_S)
    assert len(engine.asked) == 2


async def test_many_samples_come_in_larger_chunks(generation: Generation, engine: SilentEngine) -> None:
    generation.batching = PromptBatching(512)
    generation.begin([given(key) for key in range(10, 310)])
    await until(lambda: len(engine.chunk_tokens) >= 300)
    assert set(engine.chunk_tokens[-290:]) == {302 // 16}


@pytest.mark.parametrize(
    ("request_id", "prior", "tokens"), [(2, b"", b""), (1, b"\1\0\0", b""), (1, b"", b"\1")], ids=str
)
def test_samples_without_a_prompt_or_of_half_a_token_are_refused(
    request_id: int, prior: bytes, tokens: bytes
) -> None:
    """An agent ends by a refusal of the protocol then, and not by a fault of its own."""
    work = Assignment(row=0, lease=1, key=2, request_id=request_id, prior=prior, seed=3)
    with pytest.raises(FrameError, match="assign"):
        with_prompts(Assign(prompts=[Prompt(request_id=1, tokens=tokens, sampling={})], work=[work]))
