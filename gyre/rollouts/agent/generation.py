"""The samples that an agent has, and their generation by its engine.

Invariants:
- *asked together, told apart*: samples that come together are one request to the engine, but an error of one of them
  ends that one alone;
- *who is to blame*: if an engine answers and does not work, the engine is reported, and not a failure of its samples;
- *waiting is not running*: a sample that waits for its batch is unknown to the engine, and is handed back as it came.

This module must not know about the manager, connections or weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np

from gyre.clock import Clock
from gyre.engines.dialect import FinishKind, GenerateRequest, StreamChunk
from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.engines.limits import UNKNOWN_RUNNING
from gyre.rollouts.agent.engine_host import EngineHost
from gyre.rollouts.agent.engine_limits import chunk_tokens
from gyre.rollouts.agent.held_samples import (
    HeldSample,
    check_versions,
    engine_request,
    request_id,
)
from gyre.rollouts.agent.owner import HasSamples
from gyre.rollouts.agent.prompt_batching import PromptBatching
from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import Assign, Assignment, Keep, Prompt
from gyre.rollouts.protocol.progress import EndKind

SICK_WITHIN_S = 1.0
"""How long a failed request waits for others to fail, before its own sample is blamed."""

SICK_AFTER = 3
"""Failed requests in a row after which the engine is started anew: it answers, and does not work."""

RECALL_WITHIN_S = 0.6
"""How long a recall waits for the engine's last tokens; in a drain they are handed over within a second of the
notice."""

DEATH_NOTICED_S = 0.2
"""Time to notice the death of an engine after one of its requests failed."""

STEP_WINDOW_S = 0.5
"""Over this time the engine's step is measured: its tokens come in chunks of some eight steps."""

SAMPLES_PER_REQUEST = 128
"""Most samples in one request. A connection for each costs more than a short sample does."""

SAMPLES_READ_APART = 16
"""The same for an engine that reads prompts apart, as SGLang does: with more samples, its work at each chunk, for all
of a request's streams, would cost more."""


def with_prompts(frame: Assign) -> list[tuple[Assignment, Prompt]]:
    """Each sample that a frame assigns, with its prompt. Raises FrameError where there is none, or tokens are not
    whole."""
    prompts = {prompt.request_id: prompt for prompt in frame.prompts}
    for work in frame.work:
        if work.request_id not in prompts:
            raise refuse("invalid", f"assign.work: a sample of the unknown prompt {work.request_id}")
        if len(work.prior) % 4 or len(prompts[work.request_id].tokens) % 4:
            raise refuse("invalid", f"assign: half a token of the prompt {work.request_id} or its sample")
    return [(work, prompts[work.request_id]) for work in frame.work]


class Generation:
    """The generation of the samples of an agent, `owner`."""

    def __init__(self, host: EngineHost, owner: HasSamples, *, clock: Clock) -> None:
        self.samples: dict[int, HeldSample] = {}
        """The samples by lease."""
        self.tokens = 0
        """Tokens generated in all."""
        self.failed_in_a_row = 0
        """Requests that failed since one of them got a token."""
        self.is_closed = False
        """Whether new samples are handed back at once."""
        self.batching = PromptBatching(UNKNOWN_RUNNING)
        self._chunk_tokens = 0
        self._waiting: deque[HeldSample] = deque()
        """Samples that wait for their batch. Some may have ended meanwhile."""
        self._timer: asyncio.TimerHandle | None = None
        self._measured = (0.0, 0)
        """When the engine's step was last measured, and `tokens` then."""
        self._host = host
        self._owner = owner
        self._clock = clock

    @property
    def running(self) -> list[HeldSample]:
        return [held for held in self.samples.values() if not held.end]

    def begin(self, given: Sequence[tuple[Assignment, Prompt]]) -> None:
        begun = []
        for work, prompt in given:
            held = HeldSample(
                key=work.key,
                row=work.row,
                lease=work.lease,
                prompt=np.frombuffer(prompt.tokens, "<i4").astype(np.int32),
                prior=np.frombuffer(work.prior, "<i4").astype(np.int32),
                sampling=prompt.sampling,
                seed=work.seed,
                rid=request_id(work.lease),
                seen=self._owner.version,
            )
            self.samples[held.lease] = held
            if self._host.client is None or self.is_closed:
                self.finish(held, "released", "the engine is not there")
            else:
                begun.append(held)
        if self._host.reads_apart:
            self._waiting.extend(begun)
            self._give()
        else:
            self._ask_all(begun)

    def _ask_all(self, some: Sequence[HeldSample]) -> None:
        if self._host.client is None:
            return
        self._chunk_tokens = chunk_tokens(len(self.running) - len(self._waiting))
        most = SAMPLES_READ_APART if self._host.reads_apart else SAMPLES_PER_REQUEST
        for at in range(0, len(some), most):
            self._ask(list(some[at : at + most]), self._host.client)

    def _give(self) -> None:
        """Give the engine a batch of those that wait, if it is time to; else look again when it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._host.client is None or self.is_closed:
            return
        waiting = [held for held in self._waiting if not held.end and not held.cancelled]
        running = len(self.running) - len(waiting)
        now = self._clock.monotonic()
        count = self.batching.due(now, running, len(waiting))
        self._waiting = deque(waiting[count:])
        if count:
            waiting[0].given_at = now
            self._ask_all(waiting[:count])
        elif (wait_s := self.batching.wait_s(running)) < math.inf:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._give)

    def keep(self, kept: Sequence[Keep]) -> None:
        """Go on with the samples that the manager's welcome lists, and drop the others."""
        by_key = {keep.key: keep for keep in kept}
        mine, self.samples = self.samples, {}
        for held in mine.values():
            keep = by_key.get(held.key)
            if keep is None or held.cancelled:
                self._drop(held)
                continue
            held.row, held.lease = keep.row, keep.lease
            if keep.lineage and not held.has(keep.known, keep.lineage):
                if held.task is not None:
                    held.task.cancel()
                held.forget()
                held.end, held.message, held.end_seq = "released", "it went on from other tokens", 0
                self.samples[held.lease] = held
                continue
            held.sent = max(0, keep.known - held.start)
            held.end_seq = 0
            self.samples[held.lease] = held
        self._give()  # those that were dropped have left their slots

    def _drop(self, held: HeldSample) -> None:
        """Drop a sample that went on elsewhere."""
        held.cancelled = True
        if held.task is not None:
            held.task.cancel()  # closing the stream aborts it in the engine
        self.samples.pop(held.lease, None)

    def acknowledged(self, seq: int) -> None:
        """Forget samples whose ends were in reports up to this one, which the manager has."""
        for held in [held for held in self.samples.values() if held.end_seq and held.end_seq <= seq]:
            del self.samples[held.lease]

    def recall_leases(self, leases: Sequence[int]) -> None:
        """Recall the samples with these leases for the manager."""
        for lease in leases:
            held = self.samples.get(lease)
            if held is not None and not held.end:
                self._owner.spawn(self.recall(held))

    def _ask(self, some: list[HeldSample], client: EngineClient) -> None:
        if len(some) == 1:
            some[0].task = asyncio.create_task(self._generate(some[0], client))
            return
        for held in some:
            held.task = asyncio.get_running_loop().create_future()
            held.task.add_done_callback(partial(self._left, held, client))
        self._owner.spawn(self._generate_many(some, client))

    def _request(self, held: HeldSample) -> GenerateRequest:
        if not held.made:
            held.seen = self._owner.version  # it may have waited here
        held.asked(self._host.counts_from)
        held.adapter = self._host.adapter
        cache_key = self._host.loader.cache_key if self._host.loader is not None else ""
        return engine_request(held, cache_key, self._chunk_tokens)

    def _left(self, held: HeldSample, client: EngineClient, ended: asyncio.Future[None]) -> None:
        """Abort one of several samples in a request, whose stream goes on for the others."""
        if ended.cancelled() and not held.end and client is self._host.client:
            self._owner.spawn(self._abort(held, client))

    async def _abort(self, held: HeldSample, client: EngineClient) -> None:
        with contextlib.suppress(EngineError):  # its tokens then go on coming, and are dropped
            await client.abort(held.rid)

    async def _generate_many(self, some: list[HeldSample], client: EngineClient) -> None:
        """Generate several samples by one request. If it fails, each unfinished sample gets a request of its own, so
        that only the sample at fault fails."""
        try:
            async with aclosing(client.generate_many([self._request(held) for held in some])) as chunks:
                async for at, chunk in chunks:
                    held = some[at]
                    if held.cancelled or held.end:
                        continue
                    self._took(held, chunk)
                    if held.end and held.task is not None and not held.task.done():
                        held.task.cancel()
            return
        except Exception:  # also an error in a request that the engine has not seen
            # If the engine died, its samples have ended by then.
            await asyncio.sleep(DEATH_NOTICED_S)
        if self._host.client is client:
            for held in some:
                if not held.end and not held.cancelled and not (held.task is not None and held.task.done()):
                    held.rid = "r" + held.rid[1:]  # the engine may still have the old request
                    held.task = asyncio.create_task(self._generate(held, client))

    def _took(self, held: HeldSample, chunk: StreamChunk) -> None:
        """Add a chunk to its sample. Raises EngineProtocolError for one of a version that the engine cannot have."""
        check_versions(chunk, self._host.given)
        held.take(chunk, self._owner.version)
        self.tokens += len(chunk.token_ids)
        self.failed_in_a_row = 0
        if self._host.reads_apart:
            self._measure(held)
        if chunk.finish is None:
            return
        if chunk.finish.kind is FinishKind.ABORT:
            self.finish(held, "released", chunk.finish.message)
        else:
            self.finish(held, "stop" if chunk.finish.kind is FinishKind.STOP else "length", "")

    def _measure(self, held: HeldSample) -> None:
        """Pass and step of the engine, by a chunk of this sample that has just come."""
        now = self._clock.monotonic()
        if held.given_at is not None:
            self.batching.passed(now - held.given_at)
            held.given_at = None
        since, tokens = self._measured
        if now - since < STEP_WINDOW_S:
            return
        made = self.tokens - tokens
        if since and made:
            running = len(self.running) - len(self._waiting)
            self.batching.stepped(max(running, 1) * (now - since) / made)
        self._measured = now, self.tokens

    async def _generate(self, held: HeldSample, client: EngineClient) -> None:
        try:
            async with aclosing(client.generate(self._request(held))) as chunks:
                async for chunk in chunks:
                    self._took(held, chunk)
        except EngineRefused as error:
            self.finish(held, "failed", str(error)[:2000])
        except EngineError as error:
            await self._failed(held, client, error)
        except Exception as error:  # this sample's own, which must end and not hang
            self.finish(held, "failed", f"{type(error).__name__}: {error}"[:2000])

    async def _failed(self, held: HeldSample, client: EngineClient, error: EngineError) -> None:
        """Handle a failed request: if the engine as a whole does not work, it is to blame and not the sample."""
        await asyncio.sleep(DEATH_NOTICED_S)  # a death of the engine is noticed by then
        if self._host.client is client and not held.end:
            self.failed_in_a_row += 1
            if self.failed_in_a_row >= SICK_AFTER:
                self._host.end(f"{self.failed_in_a_row} requests in a row failed: {error}"[:2000])
        until = self._clock.monotonic() + SICK_WITHIN_S
        while self._host.client is client and not held.end and (self._host.sick or self.failed_in_a_row):
            if self._clock.monotonic() > until and not self._host.sick:
                break
            await asyncio.sleep(0.05)
        if self._host.client is client and not held.cancelled and not held.end:
            self.finish(held, "failed", str(error)[:2000])

    def finish(self, held: HeldSample, kind: EndKind, message: str) -> None:
        held.end, held.message = kind, message
        self._owner.report_soon()
        if self._waiting:
            self._give()

    async def recall(self, held: HeldSample) -> None:
        """End the sample's stream with the tokens that the engine has, and release the sample."""
        client = self._host.client
        if client is None or held.task is None:  # without an engine, or unknown to it
            self.finish(held, "released", "recalled")
            return
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(RECALL_WITHIN_S):
                await client.abort(held.rid)
        await self._wait_end(held, RECALL_WITHIN_S)
        if not held.end:
            if held.task is not None:
                held.task.cancel()
            self.finish(held, "released", "recalled")

    async def _wait_end(self, held: HeldSample, within_s: float) -> None:
        if held.task is not None and not held.end:
            await asyncio.wait([held.task], timeout=within_s)

    async def recall_all(self) -> None:
        await asyncio.gather(*(self.recall(held) for held in self.running))

    def adapters_in_use(self) -> set[str]:
        """Those with which samples were asked of the engine that have not ended."""
        return {held.adapter for held in self.running if held.task is not None}

    async def recall_adapter(self, name: str) -> None:
        """Recall the samples that were asked with this adapter."""
        await asyncio.gather(*(self.recall(held) for held in self.running if held.adapter == name))

    async def close(self) -> None:
        """Recall all running samples at once, with the tokens that the engine has."""
        self.is_closed = True
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(RECALL_WITHIN_S):  # the unsent tokens of a hanging engine are lost
                if self._host.client is not None:
                    await self._host.client.abort_all()
                tasks = [held.task for held in self.running if held.task is not None]
                if tasks:
                    await asyncio.wait(tasks)
        self.end_all("released", "drained")

    def end_all(self, kind: EndKind, message: str) -> None:
        """End all samples that the engine has this way. Those that wait for it are handed back."""
        self._waiting.clear()
        for held in self.running:
            if held.task is not None:
                held.task.cancel()
            self.finish(held, kind if held.task is not None else "released", message)

    def weights_changed(self, version: int, made: Mapping[str, int] | None) -> None:
        """Note that the engine now serves this version. `made`: see `EngineLoader.load`."""
        for held in self.running:
            held.changed(version, made)
