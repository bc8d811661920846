"""The agent: beside one engine, dials the rollout manager, and keeps what was generated until it is in the ledger.

Invariants:
- *the agent dials*: it needs no open port, and comes back by itself after a cut, saying what it holds;
- *work goes on*: while the manager is away the engine goes on with what it has; nothing is dropped before the
  manager said that it is in the ledger;
- *first the weights*: the engine is started with, or given, a version whose checksums are right, and only then the
  manager is told that it is loaded;
- *dead together*: what an engine died with is reported as such in one frame, whenever the manager can be told;
- *an old label rather than a new one*: where an engine cannot tell which weights made a token, it is called older.

This module must not know about Ray, the ledger, or who else generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gyre.engines.dialect import (
    FinishKind,
    GenerateRequest,
    StreamChunk,
)
from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineCommand, EngineDeath, EngineProcess
from gyre.engines.weight_loading import EngineLoader, LoadReport
from gyre.errors import GyreError
from gyre.rollouts.agent.engine_sleep import fall_asleep, wake_up
from gyre.rollouts.agent.held_samples import HeldSample, engine_request, request_id, version_runs
from gyre.rollouts.agent.policy_loading import AgentWeights
from gyre.rollouts.agent.reports import Reports
from gyre.rollouts.protocol.connection import ConnectionSettings, Endpoint, ManagerConnection, Refused
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Ack,
    Assign,
    Cancel,
    Drain,
    Draining,
    EngineDied,
    Frame,
    Held,
    Hello,
    Prompt,
    Sleep,
    Wake,
    Weights,
    Welcome,
    Work,
)
from gyre.rollouts.protocol.progress import EndKind, Progress
from gyre.weights.version.model_folder import fingerprint

FLUSH_GAP_S = 0.02
"""At least so long between two reports; one that is wanted sooner (a sample ended) waits for it."""

ENGINE_STOP_S = 1.0
"""For an engine to stop by itself. It has nothing to save, and what it had in memory goes with it either way."""

END_WITHIN_S = 20.0
"""For what runs in the background to end; an engine gets 10 s of it to stop."""

SICK_WITHIN_S = 1.0
"""How long a failed request waits for others to fail, before it is the one that failed."""

SICK_AFTER = 3
"""Requests in a row that fail before the engine is started anew: it answers, and does not work."""

DRAIN_ABORT_S = 0.6
"""How long a drain waits for the engine's last tokens; they are handed over within a second of the notice."""

SAMPLES_PER_REQUEST = 16
"""Samples that come together are asked for together, up to so many: a connection for each costs more than a short
sample does. More would cost an SGLang server, which looks at all of a request's streams at each chunk."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    name: str
    max_running: int
    kv_tokens: int
    cache: Path
    """Folder for weights that are fetched; memory-backed is best."""
    engine: str = "embedded"
    ready_within_s: float = 600.0
    fetch_timeout_s: float = 600.0
    """Nothing of a version came from anybody for so long: the manager is told."""
    bind: str | None = None
    """Where weights are served to others, as `weights.bind`; None as the job says."""
    ports: str | None = None
    """And by which ports."""
    local: bool = False


class Agent:
    """`command_for(folder, version)` says how an engine is started over a model folder. `tls()`, asked before each dial
    of an https URL, gives what to trust; None for the machine's own authorities. `run` returns when the agent was
    drained, and raises Refused, or the engine's error where no engine could be started."""

    def __init__(
        self,
        settings: AgentSettings,
        endpoint: Endpoint,
        command_for: Callable[[Path, str], EngineCommand],
        *,
        on_progress: Callable[[dict[str, Any]], None] = lambda fields: None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        connection: ConnectionSettings | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.tokens = 0
        self._endpoint = endpoint
        self._command_for = command_for
        self._on_progress = on_progress
        self._now = monotonic
        self._connection = ManagerConnection(
            endpoint,
            "agent",
            first_frame=self._hello,
            welcome=Welcome,
            welcomed=self._welcomed,
            talk=self._report_loop,
            received=self._received,
            refused=self._refused,
            tls=tls,
            settings=connection,
            monotonic=monotonic,
        )
        self._where = ("", "")
        """URL and token of the manager that welcomed this agent last."""
        self._model = "unset"
        self._engine: EngineProcess | None = None
        self._engines: list[EngineProcess] = []
        """All that may still be a process."""
        self._client: EngineClient | None = None
        self._loader: EngineLoader | None = None
        self._counts_from = -1
        """The version that makes what is asked for now, where the engine will count what older ones made; else -1."""
        self._engine_watch: asyncio.Task[None] | None = None
        self._samples: dict[int, HeldSample] = {}
        """By lease."""
        self._reports = Reports(settings.max_running)
        self._acked = 0
        self._interval_s = 0.25
        self._update_mode = "in_place"
        self._report_now = asyncio.Event()
        self._weights = AgentWeights(
            settings.cache,
            serve=self._serve,
            is_serving=lambda: self._client is not None,
            send=self._connection.send_soon,
            fetch_timeout_s=settings.fetch_timeout_s,
            bind=settings.bind,
            ports=settings.ports,
            monotonic=monotonic,
        )
        self._draining: str | None = None
        self._drain_deadline_s = 30.0
        self._drained = asyncio.Event()
        self._fatal: BaseException | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._failed_in_a_row = 0
        self._sick = ""
        """Why the engine was ended by us."""
        self._asleep = False
        """Between windows: the engine has nothing to do, and has given its memory back if it can."""
        self._released = False
        self._unsaid: list[Frame] = []
        """To be sent after the next report, by whichever connection there is then."""

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            await self._connection.run()
            if self._fatal is not None:
                raise self._fatal
        finally:
            await self._end()

    def drain(self, reason: str, deadline_s: float = 30.0) -> None:
        """Hand over and leave, as after a preemption notice. Safe to call twice."""
        if self._draining is None:
            self._draining, self._drain_deadline_s = reason, deadline_s
            self._spawn(self._drain())

    @property
    def version(self) -> int:
        """The policy version that the engine serves; -1 without."""
        return self._weights.version

    @property
    def connected(self) -> bool:
        return self._connection.is_up

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    @property
    def where(self) -> str | None:
        """The manager's address as it is known now."""
        known = self._endpoint()
        return known[0] if known is not None else None

    async def _end(self) -> None:
        """Nothing that was begun here is left, be it half started or half stopped."""
        tasks = [held.task for held in self._samples.values() if held.task is not None]
        tasks += [*self._background, *([self._engine_watch] if self._engine_watch is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_WITHIN_S)
        if self._client is not None:
            await self._client.close()
        self._weights.close()  # first: an engine takes its time, and whoever waits for this process may not
        for engine in list(self._engines):
            await engine.stop()

    def _spawn(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._give_up(task.exception())

    def _give_up(self, error: BaseException | None) -> None:
        self._fatal = self._fatal or error
        self._connection.stop()

    # -- the connection -----------------------------------------------------------------------------

    def _refused(self, error: GyreError) -> bool:
        """Nothing that the manager refuses becomes right by coming back."""
        if isinstance(error, FrameError):
            error = Refused(str(error), details={"reason": "protocol"})
        self._give_up(error)
        return False

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            instance=self.settings.name,
            incarnation=self.incarnation,
            model=self._model,
            engine=self.settings.engine,
            max_running=self.settings.max_running,
            kv_tokens=self.settings.kv_tokens,
            version=self.version,
            checksum=self._weights.checksum,
            source=self._weights.source,
            held=[
                Held(key=held.key, lease=held.lease, start=held.start, length=held.start + held.made)
                for held in self._samples.values()
                if not held.cancelled
            ],
            local=self.settings.local,
            node=socket.gethostname(),
            pid=os.getpid(),
            asleep=self._asleep,
        )

    def _welcomed(self, frame: Welcome, url: str, token: str) -> None:
        self._weights.settle(frame.plane)
        self._where = (url, token)
        self._interval_s = frame.interval_s
        self._update_mode = frame.update_mode
        self._reports.seq, self._acked = 0, 0
        kept = {keep.key: keep for keep in frame.keep}
        mine, self._samples = self._samples, {}
        for held in mine.values():
            keep = kept.get(held.key)
            if keep is None or held.cancelled:
                self._drop(held)
                continue
            held.row, held.lease = keep.row, keep.lease
            if keep.lineage and not held.has(keep.known, keep.lineage):
                if held.task is not None:
                    held.task.cancel()
                held.forget()
                held.end, held.message, held.end_seq = "released", "it went on from other tokens", 0
                self._samples[held.lease] = held
                continue
            held.sent = held.lease_began = max(0, keep.known - held.start)
            held.end_seq = 0
            self._samples[held.lease] = held
        if self._draining is not None:
            self._connection.send_soon(Draining(reason=self._draining, deadline_s=self._drain_deadline_s))
        if frame.weights is not None:
            self._spawn(self._weights.load(frame.weights, url, token))
        self._report_now.set()

    def _drop(self, held: HeldSample) -> None:
        """It went on elsewhere."""
        held.cancelled = True
        if held.task is not None:
            held.task.cancel()  # closing the stream aborts it in the engine
        self._samples.pop(held.lease, None)

    def _received(self, frame: Frame | Progress) -> None:
        if isinstance(frame, Assign):
            prompts = {prompt.ticket: prompt for prompt in frame.prompts}
            self._begin([(work, prompts[work.ticket]) for work in frame.work])
        elif isinstance(frame, Ack):
            self._acknowledged(frame.seq)
        elif isinstance(frame, Cancel):
            for _, lease in frame.rows:
                held = self._samples.get(lease)
                if held is not None and not held.end:
                    self._spawn(self._call_off(held))
        elif isinstance(frame, Weights):
            get = self._weights.fetch_ahead if frame.ahead else self._weights.load
            self._spawn(get(frame, *self._where))
        elif isinstance(frame, Sleep):
            self._spawn(self._fall_asleep())
        elif isinstance(frame, Wake):
            self._spawn(self._wake_up())
        elif isinstance(frame, Drain):
            self.drain(frame.reason or "the manager asked", frame.deadline_s)

    def _acknowledged(self, seq: int) -> None:
        self._acked = max(self._acked, seq)
        for held in [held for held in self._samples.values() if held.end_seq and held.end_seq <= seq]:
            del self._samples[held.lease]
        if self._draining is not None and not self._samples:
            self._drained.set()

    # -- samples ------------------------------------------------------------------------------------

    def _begin(self, given: Sequence[tuple[Work, Prompt]]) -> None:
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
                seen=self.version,
            )
            self._samples[held.lease] = held
            if self._client is None or self._draining is not None:
                self._finish(held, "released", "the engine is not there")
            else:
                begun.append(held)
        if self._client is None:
            return
        for at in range(0, len(begun), SAMPLES_PER_REQUEST):
            self._ask(begun[at : at + SAMPLES_PER_REQUEST], self._client)

    def _ask(self, some: list[HeldSample], client: EngineClient) -> None:
        if len(some) == 1:
            some[0].task = asyncio.create_task(self._generate(some[0], client))
            return
        for held in some:
            held.task = asyncio.get_running_loop().create_future()
            held.task.add_done_callback(partial(self._left, held, client))
        self._spawn(self._generate_many(some, client))

    def _request(self, held: HeldSample) -> GenerateRequest:
        held.asked(self._counts_from)
        return engine_request(held, self._loader.cache_key if self._loader is not None else "")

    def _left(self, held: HeldSample, client: EngineClient, ended: asyncio.Future[None]) -> None:
        """One of several in a request is given up: the engine is told, for its stream goes on for the others."""
        if ended.cancelled() and not held.end and client is self._client:
            self._spawn(self._abort(held, client))

    async def _abort(self, held: HeldSample, client: EngineClient) -> None:
        with contextlib.suppress(EngineError):  # then its tokens go on coming, and are dropped
            await client.abort(held.rid)

    async def _generate_many(self, some: list[HeldSample], client: EngineClient) -> None:
        """One request for all of them. When it breaks, what is left of it is asked for one by one, so that what is
        wrong with one sample is said of that one."""
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
        except Exception:  # also what is wrong with a request before the engine sees it
            await asyncio.sleep(0.2)  # if it was the engine's death, its samples have ended by now
        if self._client is client:
            for held in some:
                if not held.end and not held.cancelled and not (held.task is not None and held.task.done()):
                    held.rid = "r" + held.rid[1:]  # the engine may not have let go of the other yet
                    held.task = asyncio.create_task(self._generate(held, client))

    def _took(self, held: HeldSample, chunk: StreamChunk) -> None:
        held.take(chunk, self.version)
        self.tokens += len(chunk.token_ids)
        self._failed_in_a_row = 0
        if chunk.finish is None:
            return
        if chunk.spans and held.counted is None:  # SGLang calls a pass that was under way the newer's
            held.true_runs = version_runs(chunk, held)
        if chunk.finish.kind is FinishKind.ABORT:
            self._finish(held, "released", chunk.finish.message)
        else:
            self._finish(held, "stop" if chunk.finish.kind is FinishKind.STOP else "length", "")

    async def _generate(self, held: HeldSample, client: EngineClient) -> None:
        try:
            async with aclosing(client.generate(self._request(held))) as chunks:
                async for chunk in chunks:
                    self._took(held, chunk)
        except EngineRefused as error:
            self._finish(held, "failed", str(error)[:2000])
        except EngineError as error:
            await self._failed(held, client, error)
        except Exception as error:  # of this sample alone, and it must not hang for it
            self._finish(held, "failed", f"{type(error).__name__}: {error}"[:2000])

    async def _failed(self, held: HeldSample, client: EngineClient, error: EngineError) -> None:
        """The engine could not. If it cannot do anything, that is what is told, and not that the sample is to blame."""
        await asyncio.sleep(0.2)  # its death is noticed by then
        if self._client is client and not held.end:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= SICK_AFTER:
                self._end_engine(f"{self._failed_in_a_row} requests in a row failed: {error}"[:2000])
        until = self._now() + SICK_WITHIN_S
        while self._client is client and not held.end and (self._sick or self._failed_in_a_row):
            if self._now() > until and not self._sick:
                break
            await asyncio.sleep(0.05)
        if self._client is client and not held.cancelled and not held.end:
            self._finish(held, "failed", str(error)[:2000])

    def _finish(self, held: HeldSample, kind: EndKind, message: str) -> None:
        held.end, held.message = kind, message
        self._report_now.set()

    async def _call_off(self, held: HeldSample) -> None:
        """Its stream ends with the tokens that the engine has, and then it is released."""
        client = self._client
        if client is None:
            self._finish(held, "released", "called off")
            return
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(DRAIN_ABORT_S):
                await client.abort(held.rid)
        await self._wait_end(held, DRAIN_ABORT_S)
        if not held.end:
            if held.task is not None:
                held.task.cancel()
            self._finish(held, "released", "called off")

    async def _wait_end(self, held: HeldSample, within_s: float) -> None:
        if held.task is not None and not held.end:
            await asyncio.wait([held.task], timeout=within_s)

    # -- reporting ----------------------------------------------------------------------------------

    async def _report_loop(self) -> None:
        """Everything each interval; what ended at once, and by itself, for many samples end in an interval."""
        due = self._now()
        while True:
            # `wait_for` would forget to be cancelled where a sample ends at that moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - self._now())):
                    await self._report_now.wait()
            self._report_now.clear()
            everything = self._now() >= due
            if everything:
                due = self._now() + self._interval_s
            while True:
                frame, more = self._reports.next(
                    self._samples.values(),
                    everything=everything,
                    made_tokens=self.tokens,
                    interval_s=self._interval_s,
                    now=self._now(),
                )
                await self._connection.send(frame)
                if not more:
                    break
            while self._unsaid:
                await self._connection.send(self._unsaid[0])
                del self._unsaid[0]
            self._on_progress({"version": self.version, "tokens": self.tokens, "samples": len(self._samples)})
            await asyncio.sleep(FLUSH_GAP_S)

    # -- the engine ---------------------------------------------------------------------------------

    async def _serve(self, folder: Path, weights: Weights) -> LoadReport | None:
        text = str(weights.version)
        if self._engine is not None and self._loader is not None:
            return await self._update(self._loader, folder, text)
        engine = EngineProcess(
            self._command_for(folder, text),
            ready_within_s=self.settings.ready_within_s,
            stop_within_s=ENGINE_STOP_S,
        )
        self._engines.append(engine)
        client = None
        try:
            await engine.start()
            client = engine.client()
            loader = EngineLoader(client, folder, key=engine.loader_key)
            await loader.arm()  # before it has work
        except BaseException:
            if client is not None:
                await client.close()
            await engine.stop()
            self._engines.remove(engine)
            raise
        self._engine, self._client, self._loader = engine, client, loader
        self._counts_from = -1 if loader.why_not else weights.version
        self._engine_watch = asyncio.create_task(self._watch_engine(engine))
        self._model = fingerprint(folder)
        return None

    async def _update(self, loader: EngineLoader, folder: Path, version: str) -> LoadReport:
        """Under running samples the engine stands only for the load, and they go on with the new weights."""
        if self._update_mode == "handover":
            await self._call_all_off()
        try:
            report = await loader.load(
                version,
                folder,
                keep=self._update_mode == "in_place",
                call_off=self._call_all_off,
                changed=partial(self._weights_changed, int(version)),
            )
        except EngineRefused:
            raise
        except EngineError as error:
            self._end_engine(f"it did not load version {version}: {error}"[:2000])
            raise
        self._counts_from = -1 if loader.why_not else int(version)
        return report

    def _weights_changed(self, version: int, made: Mapping[str, int] | None) -> None:
        self._counts_from = version if made is not None else -1
        for held in self._samples.values():
            if not held.end:
                held.changed(version, made)

    async def _call_all_off(self) -> None:
        running = [held for held in self._samples.values() if not held.end]
        await asyncio.gather(*(self._call_off(held) for held in running))

    def _end_engine(self, why: str) -> None:
        """It lives and does not work: what follows is what follows upon its death."""
        engine = self._engine
        if engine is not None and not self._sick:
            self._sick = why
            self._spawn(engine.stop())

    async def _fall_asleep(self) -> None:
        said = await fall_asleep(self._client, self._now)
        self._asleep = self._client is not None
        self._released = self._asleep and not said.error
        self._connection.send_soon(said)

    async def _wake_up(self) -> None:
        try:
            said = await wake_up(self._client if self._released else None, self._now)
        except EngineError as error:
            self._end_engine(f"it did not take its memory again: {error}"[:2000])
            return
        self._asleep = False
        self._connection.send_soon(said)

    # -- the engine's end, and ours -----------------------------------------------------------------

    async def _watch_engine(self, engine: EngineProcess) -> None:
        death = await engine.died()
        if self._engine is not engine or self._connection.is_stopped:
            return
        self._spawn(self._engine_died(engine, death))

    async def _engine_died(self, engine: EngineProcess, death: EngineDeath) -> None:
        client, self._engine, self._client, self._loader = self._client, None, None, None
        self._weights.lost()
        self._asleep = False
        self._failed_in_a_row = 0
        # Both: requests may fail before their engine's death is noticed, and what ended it is not what they say.
        reason, self._sick = death.reason + (f", after {self._sick}" if self._sick else ""), ""
        if client is not None:
            await client.close()
        await engine.stop()
        self._engines.remove(engine)
        message = f"The engine of {self.settings.name} died: {reason}."
        for held in self._samples.values():
            if not held.end:
                if held.task is not None:
                    held.task.cancel()
                self._finish(held, "died", f"{message} {death.tail[-1000:]}")
        self._unsaid.append(EngineDied(message=message[:4000], tail=death.tail[-8000:]))
        self._report_now.set()

    async def _drain(self) -> None:
        """Everything that runs is called off at once; what it had is reported, and acknowledged before the end."""
        assert self._draining is not None
        self._connection.send_soon(Draining(reason=self._draining, deadline_s=self._drain_deadline_s))
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(DRAIN_ABORT_S):  # an engine that hangs keeps what it did not say
                if self._client is not None:
                    await self._client.abort_all()
                tasks = [
                    held.task for held in self._samples.values() if held.task is not None and not held.end
                ]
                if tasks:
                    await asyncio.wait(tasks)
        for held in self._samples.values():
            if not held.end:
                if held.task is not None:
                    held.task.cancel()
                self._finish(held, "released", "drained")
        self._report_now.set()
        if self._samples:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_deadline_s):
                    await self._drained.wait()
        self._connection.stop()
