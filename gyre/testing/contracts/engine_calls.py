"""Requests to an engine under test, and what came of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre.engines.contract import Engine
from gyre.engines.dialect import (
    EngineLoad,
    Finish,
    FinishKind,
    GenerateRequest,
    SamplingParams,
    StreamChunk,
    VersionSpan,
)

BEGIN_WITHIN_S = 60.0
END_WITHIN_S = 60.0
STILL_WITHIN_S = 20.0
"""Generous: an engine on a busy machine's CPU makes a few tokens a second."""

LONG = 600
"""More tokens than an engine generates while a clause watches it run."""

LOAD_WITHIN_S = 20.0
"""How long an engine may take to report its true load: a few steps, which a busy machine makes slowly."""

PAUSES = 4
"""How often a pause is tried that comes too late to hold anything."""


class NotKept(Exception):
    """A clause's condition does not hold; the text says what was seen instead."""


@dataclass
class Heard:
    """What came of one request so far."""

    rid: str
    chunks: list[StreamChunk] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [float(logprob) for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def finish(self) -> Finish:
        finish = self.chunks[-1].finish
        assert finish is not None
        return finish

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return self.chunks[-1].spans


@dataclass
class Running:
    """Requests that are under way."""

    heard: list[Heard]
    tasks: list[asyncio.Task[Heard]] = field(default_factory=list)

    async def end(self) -> list[Heard]:
        async with asyncio.timeout(END_WITHIN_S):
            return await asyncio.gather(*self.tasks)

    async def still(self) -> list[int]:
        """How many tokens each has once no more come."""
        counts: list[int] = []
        async with asyncio.timeout(STILL_WITHIN_S):
            while True:
                before, counts = counts, [len(heard.tokens) for heard in self.heard]
                if before == counts:
                    return counts
                await asyncio.sleep(0.5)


def prompt_of(seed: int, vocab: int, length: int = 16) -> list[int]:
    """A prompt of its own: no two seeds share a cached prefix. The last two tokens of the vocabulary are left out, for
    small models have their special ones there."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab - 2, length)]


def request(
    tokens: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        rid=uuid.uuid4().hex,
        input_ids=np.array(tokens, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens, ignore_eos=ignore_eos, **sampling),
    )


async def listen(client: Engine, asked: GenerateRequest, heard: Heard | None = None) -> Heard:
    """Hear one request to its end."""
    heard = heard or Heard(asked.rid)
    try:
        async with aclosing(client.generate(asked)) as chunks:
            async for chunk in chunks:
                heard.chunks.append(chunk)
                heard.grew.set()
    finally:
        heard.grew.set()  # who waits for its beginning hears of its error, and not of a deadline
    return heard


@asynccontextmanager
async def listening(client: Engine, asked: Sequence[GenerateRequest]) -> AsyncIterator[Running]:
    """Requests that run meanwhile; each has its first token at the start of the block."""
    running = Running([Heard(each.rid) for each in asked])
    running.tasks = [
        asyncio.create_task(listen(client, each, heard))
        for each, heard in zip(asked, running.heard, strict=True)
    ]
    try:
        async with asyncio.timeout(BEGIN_WITHIN_S):
            await asyncio.gather(*(heard.grew.wait() for heard in running.heard))
        yield running
    finally:
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)


async def ended_by(
    stop: Callable[[Sequence[GenerateRequest]], Awaitable[None]],
    client: Engine,
    prompts: Sequence[list[int]],
    *,
    undo: Callable[[], Awaitable[None]] | None = None,
    **sampling: Any,
) -> list[Heard]:
    """What was heard of requests that ran when `stop` was called. Tried again, after `undo`, where one had all its
    tokens before: on a busy machine whoever asks is held up for as long as that takes."""
    for _ in range(PAUSES):
        asked = [request(prompt, LONG, **sampling) for prompt in prompts]
        async with listening(client, asked) as running:
            await stop(asked)
            ended = await running.end()
        if all(heard.finish.kind is not FinishKind.LENGTH for heard in ended):
            return ended
        if undo is not None:
            await undo()
    raise NotKept(f"one had all its {LONG} tokens, {PAUSES} times")


async def until_busy_with(requests: int, client: Engine) -> EngineLoad:
    """Wait until the engine reports this many requests, which it may do some steps late."""
    load = None
    try:
        async with asyncio.timeout(LOAD_WITHIN_S):
            while True:
                load = await client.load()
                if load.running + load.waiting == requests:
                    return load
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise NotKept(f"it says {load} where {requests} requests are open") from None
