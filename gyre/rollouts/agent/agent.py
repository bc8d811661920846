"""The agent: beside one engine, dials the rollout manager, and keeps what was generated until it is in the ledger.

It joins four parts: `ManagerConnection` (dialling and frames), `AgentWeights` (policy versions), `EngineHost` (the
engine's process) and `Generation` (the samples that it has).

Invariants:
- *the agent dials*: it needs no open port, and comes back by itself after a cut, saying what it holds;
- *work goes on*: while the manager is away the engine goes on with what it has; nothing is dropped before the
  manager said that it is in the ledger;
- *first the weights*: the engine is started with, or given, a version whose checksums are right, and only then the
  manager is told that it is loaded;
- *dead together*: what an engine died with is reported as such in one frame, whenever the manager can be told.

This module must not know about Ray, the ledger, or who else generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.clock import Clock
from gyre.engines.errors import EngineError
from gyre.engines.weight_loading import LoadReport
from gyre.errors import GyreError
from gyre.models.adapters import AdapterLimits
from gyre.rollouts.agent.engine_host import EngineHost
from gyre.rollouts.agent.engine_limits import limits_of, limits_unknown
from gyre.rollouts.agent.generation import Generation, with_prompts
from gyre.rollouts.agent.owner import Check, Commands, HearsProgress
from gyre.rollouts.agent.policy_loading import ENGINE_STARTS, AgentWeights
from gyre.rollouts.agent.prompt_batching import PromptBatching
from gyre.rollouts.agent.reports import Reports
from gyre.rollouts.protocol.connection import ConnectionSettings, ManagerConnection, Refused
from gyre.rollouts.protocol.endpoint import Endpoint
from gyre.rollouts.protocol.fields import LATER, FrameError
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
    Sleep,
    Wake,
    Weights,
    Welcome,
)
from gyre.rollouts.protocol.progress import GenerationProgress

FLUSH_GAP_S = 0.02
"""Shortest time between two reports; one that is wanted sooner (a sample ended) waits for it."""

END_WITHIN_S = 20.0
"""For what runs in the background to end; an engine gets 10 s of it to stop."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    name: str
    max_running: int | None
    """Samples that the engine generates at once, None for as many as it can."""
    kv_tokens: int | None
    """Tokens of its KV memory to count on, None for all that it has."""
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
    codec: str = ""
    """The codec of the job's own that this instance may import, as `weights.codec` names it. What only the manager
    names is not imported: weights then come as they are."""
    local: bool = False
    starts: int | None = ENGINE_STARTS
    """Starts of the engine in a row that may fail before the agent gives up; None for any number."""
    base: Path | None = None
    """A folder of the model that the job's first version is made from. The engine is started over it while nobody has a
    version yet, or while one is fetched; it serves none of it."""


@dataclass(slots=True)
class JobWishes:
    """What a job wants of its engines, as the manager said at joining."""

    deterministic: bool = False
    """As `rollouts.deterministic`."""
    adapters: AdapterLimits | None = None
    """The adapters that the job trains instead of a model (`config.lora`)."""
    turns: bool = False
    """It has agents: what a request drew, the next one begins with."""


class Agent:
    """`commands` say how an engine is started. `run` returns when the agent was drained, and raises Refused, or the
    engine's error where no engine could be started."""

    def __init__(
        self,
        settings: AgentSettings,
        endpoint: Endpoint,
        commands: Commands,
        *,
        progress: HearsProgress | None = None,
        connection: ConnectionSettings | None = None,
        wishes: JobWishes | None = None,
        clock: Clock = time,
    ) -> None:
        """`wishes` is filled with what the job wants of its engines, before `commands` are asked for one."""
        self.settings = settings
        self.wishes = wishes or JobWishes()
        self.incarnation = uuid.uuid4().hex
        self._endpoint = endpoint
        self._progress = progress
        self._clock = clock
        self._connection = ManagerConnection(
            endpoint, "agent", self, welcome=Welcome, settings=connection, clock=clock
        )
        self._where = ("", "")
        """URL and weights key of the manager that welcomed this agent last."""
        self._host = EngineHost(
            commands, self, ready_within_s=settings.ready_within_s, clock=clock, base=settings.base
        )
        self._report_now = asyncio.Event()
        self._generation = Generation(self._host, self, clock=clock)
        self._weights = AgentWeights(
            settings.cache,
            self,
            fetch_timeout_s=settings.fetch_timeout_s,
            bind=settings.bind,
            ports=settings.ports,
            codec=settings.codec,
            starts=settings.starts,
            clock=clock,
        )
        self._limits = limits_unknown(
            settings.max_running, settings.kv_tokens, "the engine has not started yet"
        )
        self._reports = Reports(self._limits.max_running)
        self._interval_s = 0.25
        self._update_mode = "in_place"
        self._draining: str | None = None
        self._drain_deadline_s = 30.0
        self._drained = asyncio.Event()
        self._fatal: BaseException | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._newest_said = -1
        """The newest version that the manager was told of as loaded, before tokens of it are reported."""
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
            self._generation.is_closed = True
            self.spawn(self._drain())

    @property
    def version(self) -> int:
        """The policy version that the engine serves; -1 without."""
        return self._weights.version

    @property
    def tokens(self) -> int:
        """Generated in all."""
        return self._generation.tokens

    @property
    def samples(self) -> Generation:
        """Those that it has, and their generation."""
        return self._generation

    @property
    def connected(self) -> bool:
        return self._connection.is_up

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    @property
    def where(self) -> str | None:
        """The manager's address as it is known now."""
        known = self._endpoint.where()
        return known[0] if known is not None else None

    async def _end(self) -> None:
        """Nothing that was begun here is left, be it half started or half stopped."""
        tasks: list[asyncio.Future[Any]] = [
            held.task for held in self._generation.samples.values() if held.task is not None
        ]
        tasks += [*self._background, *self._host.stop_watching()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_WITHIN_S)
        if self._host.client is not None:
            await self._host.client.close()
        self._weights.close()  # first: an engine takes its time, and whoever waits for this process may not
        await self._host.close()

    def spawn(self, work: Awaitable[Any]) -> None:
        """Run it in the background. What it raises ends the agent."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._give_up(task.exception())

    def _give_up(self, error: BaseException | None) -> None:
        self._fatal = self._fatal or error
        self._stop()

    def _stop(self) -> None:
        self._host.stop_watching()
        self._connection.stop()

    # -- the connection -----------------------------------------------------------------------------

    def refused(self, error: GyreError) -> bool:
        """Whether to dial again: after what is put off, but nothing that is refused becomes right by coming back."""
        if error.details.get("reason") == LATER:
            return True
        if isinstance(error, FrameError):
            error = Refused(str(error), details={"reason": "protocol"})
        self._give_up(error)
        return False

    def first_frame(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            instance=self.settings.name,
            incarnation=self.incarnation,
            model=self._host.model,
            engine=self.settings.engine,
            max_running=self._limits.max_running,
            kv_tokens=self._limits.kv_tokens,
            version=self.version,
            checksum=self._weights.checksum,
            source=self._weights.source,
            held=[
                Held(key=held.key, lease=held.lease, start=held.start, length=held.start + held.made)
                for held in self._generation.samples.values()
                if not held.cancelled
            ],
            local=self.settings.local,
            node=socket.gethostname(),
            pid=os.getpid(),
            asleep=self._host.is_asleep,
        )

    def welcomed(self, frame: Welcome, url: str, token: str) -> None:
        self._weights.settle(frame.plane)
        self._where = (url, frame.weights_key)
        self.wishes.deterministic = frame.deterministic
        self.wishes.turns = frame.turns
        if frame.adapter_rank:
            self.wishes.adapters = AdapterLimits(frame.adapter_rank, tuple(frame.adapter_layers))
        self._interval_s = frame.interval_s
        self._update_mode = frame.update_mode
        self._reports.seq = 0
        self._generation.keep(frame.keep)
        if self._draining is not None:
            self._connection.send_soon(Draining(reason=self._draining, deadline_s=self._drain_deadline_s))
        if self._host.client is not None:
            self._connection.send_soon(self._limits)
        if self.settings.base is not None and self._is_to_come(frame.weights):
            self._host.start_early(self.settings.base)
        if frame.weights is not None:
            self.spawn(self._weights.load(frame.weights, url, frame.weights_key))
        self.report_soon()

    def tell(self, frame: Frame) -> None:
        """Send it to the manager, if it is there."""
        self._connection.send_soon(frame)

    def report_soon(self) -> None:
        """Report what has ended, and not only at the next interval."""
        self._report_now.set()

    def _is_to_come(self, weights: Weights | None) -> bool:
        """Whether it takes time until this machine has the version, in which an engine can start."""
        if weights is None:
            return True
        return not self._weights.source and not (weights.local_path and Path(weights.local_path).is_dir())

    def received(self, frame: Frame | GenerationProgress) -> None:
        if isinstance(frame, Assign):
            self._generation.begin(with_prompts(frame))
        elif isinstance(frame, Ack):
            self._generation.acknowledged(frame.seq)
            if self._draining is not None and not self._generation.samples:
                self._drained.set()
        elif isinstance(frame, Cancel):
            self._generation.recall_leases([lease for _, lease in frame.rows])
        elif isinstance(frame, Weights):
            get = self._weights.fetch_ahead if frame.ahead else self._weights.load
            self.spawn(get(frame, *self._where))
        elif isinstance(frame, Sleep):
            self.spawn(self._fall_asleep())
        elif isinstance(frame, Wake):
            self.spawn(self._wake_up())
        elif isinstance(frame, Drain):
            self.drain(frame.reason or "the manager asked", frame.deadline_s)

    async def talk(self) -> None:
        """Everything each interval; what ended at once, and by itself, for many samples end in an interval."""
        due = self._clock.monotonic()
        while True:
            # `wait_for` would forget to be cancelled where a sample ends at that moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                    await self._report_now.wait()
            self._report_now.clear()
            everything = self._clock.monotonic() >= due
            if everything:
                due = self._clock.monotonic() + self._interval_s
            while True:
                self._newest_said = max(self._newest_said, self.version)
                await asyncio.sleep(0)  # what says that this version is loaded is on its way first
                frame, more = self._reports.next(
                    self._generation.samples.values(),
                    everything=everything,
                    made_tokens=self._generation.tokens,
                    interval_s=self._interval_s,
                    now=self._clock.monotonic(),
                    newest=self._newest_said,
                )
                await self._connection.send(frame)
                if not more:
                    break
            while self._unsaid:
                await self._connection.send(self._unsaid[0])
                del self._unsaid[0]
            if self._progress is not None:
                self._progress.tick(
                    version=self.version,
                    tokens=self._generation.tokens,
                    samples=len(self._generation.samples),
                )
            await asyncio.sleep(FLUSH_GAP_S)

    # -- the engine ---------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine."""
        return self._host.client is not None

    @property
    def why_disk(self) -> str:
        """As `EngineHost.why_disk`."""
        return self._host.why_disk

    async def serve(self, folder: Path, weights: Weights, check: Check) -> LoadReport | None:
        """As `EngineHost.serve`."""
        report = await self._host.serve(folder, str(weights.version), self._update_mode, check)
        if report is None:  # started, and not updated
            await self._learn_limits()
        return report

    async def _learn_limits(self) -> None:
        """What the engine takes at once, told before the manager hears that it has weights."""
        client = self._host.client
        if client is None:  # it has died meanwhile
            return
        settings = self.settings
        try:
            self._limits = limits_of(
                await client.load(),
                await client.info(),
                max_running=settings.max_running,
                kv_tokens=settings.kv_tokens,
            )
        except EngineError as error:  # it serves all the same; whether it lives is looked at elsewhere
            self._limits = limits_unknown(
                settings.max_running,
                settings.kv_tokens,
                f"the engine does not say what it can: {error}"[:500],
            )
        self._reports.max_running = self._limits.max_running
        self._generation.batching = PromptBatching(self._limits.max_running)
        self._connection.send_soon(self._limits)

    async def _fall_asleep(self) -> None:
        self._connection.send_soon(await self._host.fall_asleep())

    async def _wake_up(self) -> None:
        if (said := await self._host.wake_up()) is not None:
            self._connection.send_soon(said)

    def engine_lost(self) -> None:
        self._weights.lost()
        self._generation.failed_in_a_row = 0

    def engine_died(self, reason: str, tail: str) -> None:
        message = f"The engine of {self.settings.name} died: {reason}."
        self._generation.end_all("died", f"{message} {tail[-1000:]}")
        self._unsaid.append(EngineDied(message=message[:4000], tail=tail[-8000:]))
        self.report_soon()

    # -- the end ------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Everything that runs is called off at once; what it had is reported, and acknowledged before the end."""
        assert self._draining is not None
        self._connection.send_soon(Draining(reason=self._draining, deadline_s=self._drain_deadline_s))
        await self._generation.close()
        self.report_soon()
        if self._generation.samples:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_deadline_s):
                    await self._drained.wait()
        self._stop()
