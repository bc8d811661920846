"""Runs sessions: claims them, runs the agent's code for each, and ends them.

Invariants:
- *each session by itself*: what one session's code raises, also SystemExit, ends that session and no other. Beyond
  that Python cannot keep sessions of one process apart: code that blocks the event loop holds up all of them (until the
  vertex is replaced), a thread that hangs stays, a task that the code started and forgot goes on, and what ends the
  process ends all;
- *ended once, or handed on*: a session that ran to its end is ended before its place is free; one that is cancelled,
  lost or interrupted is not ended, and goes on elsewhere;
- *no prompts are burnt*: where sessions fail one after another for the infrastructure's fault, the worker pauses, and
  then tries one.

This module must not know of vertices, jobs or graphs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from gyre.agents.client import Claimed, SessionClient
from gyre.agents.environments import Episode, EpisodeProgress
from gyre.agents.outcomes import (
    INFRA_FAULT,
    KINDS,
    MOST_REASON,
    TRUNCATED,
    Outcome,
    SessionLost,
    SessionRefused,
    outcome_of,
    outcome_of_error,
)
from gyre.agents.relay import Relay
from gyre.agents.session import BlockingSession, Session
from gyre.agents.threads import DaemonThreads
from gyre.config.sections import AgentRoleSettings
from gyre.errors import GyreError

BEAT_EVERY_S = 4.0
"""The manager wants to hear of a worker every 5 s, and gives its sessions away after 15 s of silence."""

LEAVE_S = 5.0
"""How long the code of a session that is over may take to leave, after it was cancelled. Then it is left behind."""

PAUSE_S = 15.0
"""How long a worker pauses whose sessions fail for the infrastructure's fault; doubled with each further one."""

MOST_PAUSE_S = 600.0
"""What is broken may be mended by people meanwhile, who should see it work soon after."""

CLAIM_PAUSE_S = 1.0
"""Before the next claim, where the manager was away for all of one or handed out what is no session."""

Agent = Callable[[Session, EpisodeProgress], Coroutine[Any, Any, Outcome]]
"""Runs one session to its end, and notes its reward so far."""


def agent_of(found: Callable[..., Any], settings: AgentRoleSettings, config: Mapping[str, Any]) -> Agent:
    """The agent that the job names: `found` is its function, or the class of its environment."""

    async def environment(session: Session, progress: EpisodeProgress) -> Outcome:
        made = await session.tool(partial(found, **settings.options))
        return await Episode(made, session, progress, settings.recovery == "snapshot").run()

    async def coroutine(session: Session, progress: EpisodeProgress) -> Outcome:
        return outcome_of(await found(session, **settings.options))

    async def plain(session: Session, progress: EpisodeProgress) -> Outcome:
        call = partial(found, BlockingSession(session), **settings.options)
        return outcome_of(await asyncio.get_running_loop().run_in_executor(session.threads, call))

    if settings.environment:
        return environment
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    return coroutine if is_async else plain


@dataclass(slots=True)
class RunnerCounts:
    """Sessions of this worker by how they ended, and what was left behind."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    lost: int = 0
    left_behind: int = 0
    """Sessions whose code did not leave after it was cancelled."""


@dataclass(slots=True)
class _Running:
    session: Session
    task: asyncio.Task[None]
    is_lost: bool = False
    is_ending: bool = False
    """Whether the manager is being told of its end: it may have it, and say that this worker runs it no more."""


class HearsRunner(Protocol):
    def noted(self, kind: str, details: dict[str, Any]) -> None:
        """The worker pauses, or goes on: an event for the journal."""

    def progressed(self, fields: dict[str, Any]) -> None:
        """Sessions have ended."""


class SessionRunner:
    """Runs up to `settings.concurrency` sessions at once in the event loop in which `run` is called. `relay` serves
    SDKs; without one sessions have no `base_url`."""

    def __init__(
        self,
        client: SessionClient,
        agent: Agent,
        settings: AgentRoleSettings,
        *,
        config: Mapping[str, Any] | None = None,
        relay: Relay | None = None,
        owner: HearsRunner | None = None,
    ) -> None:
        self._client = client
        self._agent = agent
        self._settings = settings
        self._config = config or {}
        self._relay = relay
        self._owner = owner
        self._threads = DaemonThreads()
        self._running: dict[str, _Running] = {}
        """By session and claim."""
        self._freed = asyncio.Event()
        self.interrupted: list[str] = []
        """The claims of the sessions that ran when it was cancelled, by name."""
        self.counts = RunnerCounts()
        self.faults = 0
        """Sessions in a row that ended by the infrastructure's fault."""
        self._first_pause = 0
        """How many of them there were when the worker first paused; 0 while it has not."""
        self._last_pause = 0
        """The same of its last pause: while there are no more, it tries a session as soon as there is one."""
        self.last_fault = ""
        self.paused_s = 0.0
        """How long the pause takes that the worker makes now; 0 while it works."""
        self.last_turn = time.monotonic()
        """When the loop last had its turn: code that blocks it is seen by it."""

    @property
    def held(self) -> list[str]:
        """The ids of the sessions that it runs. Another thread may ask."""
        return [one.session.id for one in list(self._running.values())]

    @property
    def threads(self) -> int:
        """Threads that run the agent's code now."""
        return self._threads.running

    async def run(self) -> None:
        """Claim and run sessions until it is cancelled; then all of them are interrupted, and none is ended. Raises
        GyreError where the manager refuses the worker for good."""
        pulse = asyncio.create_task(self._keep_pulse())
        try:
            while True:
                if self.faults >= self._settings.breaker and self.faults > self._last_pause:
                    await self._pause()
                room = self._room()
                if room == 0:
                    self._freed.clear()
                    await self._freed.wait()
                    continue
                for one in await self._claim(room):
                    self._begin(one)
        finally:
            pulse.cancel()
            await self._leave()

    def _room(self) -> int:
        """How many sessions may be claimed now: after a pause one, until it has shown that all is well again."""
        if self.faults >= self._settings.breaker:
            return 0 if self._running else 1
        return max(0, self._settings.concurrency - len(self._running))

    async def _claim(self, room: int) -> list[Claimed]:
        try:
            return await self._client.claim(room)
        except (TimeoutError, ValueError) as error:
            if isinstance(error, ValueError):
                traceback.print_exception(error)
            await asyncio.sleep(CLAIM_PAUSE_S)
            return []

    async def _pause(self) -> None:
        """Wait until nothing runs, and then for a while, longer each time. A session that ended well meanwhile ends
        the pause."""
        while self._running and self.faults >= self._settings.breaker:
            self._freed.clear()
            await self._freed.wait()
        if self.faults < self._settings.breaker:
            return
        self._first_pause = self._first_pause or self.faults
        self._last_pause = self.faults
        tried = self.faults - self._first_pause  # what ran beside the breaker's last session was no trial
        self.paused_s = min(MOST_PAUSE_S, PAUSE_S * 2.0 ** min(tried, 16))
        self._note(
            "AgentPaused", {"faults": self.faults, "pause_s": self.paused_s, "last_fault": self.last_fault}
        )
        await asyncio.sleep(self.paused_s)
        self.paused_s = 0.0

    def _note(self, kind: str, details: dict[str, Any]) -> None:
        if self._owner is not None:
            self._owner.noted(kind, details)

    async def _keep_pulse(self) -> None:
        while True:
            self.last_turn = time.monotonic()
            await asyncio.sleep(1.0)

    # -- one session ---------------------------------------------------------------------------------

    def _begin(self, claimed: Claimed) -> None:
        self.lose({claimed.id})  # this claim takes the place of an earlier one
        session = Session(
            claimed,
            self._client,
            config=self._config,
            tool_timeout_s=self._settings.tool_timeout_s,
            threads=self._threads,
        )
        if self._relay is not None:
            self._relay.admit(session)
        task = asyncio.create_task(self._run(session), name=f"session {claimed.id}")
        self._running[claimed.name] = _Running(session, task)

    async def _run(self, session: Session) -> None:
        try:
            outcome = await self._outcome(session)
            self._running[session.claimed.name].is_ending = True
            self._count(await self._ended(session, outcome))
        except (SessionLost, SessionRefused, TimeoutError) as error:
            # Somebody else has it, or its end was not taken: it is not this worker's to end.
            self.counts.lost += 1
            if isinstance(error, SessionRefused):
                print(f"session {session.id}: {error}", flush=True)
        finally:
            session.over = True
            if self._relay is not None:
                self._relay.dismiss(session)
            self._running.pop(session.claimed.name, None)
            self._freed.set()

    async def _ended(self, session: Session, outcome: Outcome) -> Outcome:
        """End it, and say how it has ended: what the manager does not take, a reward of 1e308 say, is a fault of the
        agent's code, of which the refusal tells. Raises what `end` of the client raises."""
        try:
            await self._client.end(session.claimed, outcome)
        except SessionRefused as error:
            outcome = Outcome(INFRA_FAULT, reason=str(error)[:MOST_REASON])
            await self._client.end(session.claimed, outcome)
        return outcome

    async def _outcome(self, session: Session) -> Outcome:
        """Run the agent's code within the session's time. Raises SessionLost."""
        progress = EpisodeProgress()
        code = asyncio.create_task(self._guarded(session, progress), name=f"agent of {session.id}")
        try:
            await asyncio.wait({code}, timeout=session.seconds_left)
            if not code.done():
                await self._end_code(code)
                return Outcome(
                    TRUNCATED, progress.reward, reason=f"it had its {session.claimed.seconds_left:g} s"
                )
            return code.result()
        except asyncio.CancelledError:
            await self._end_code(code)
            raise

    async def _guarded(self, session: Session, progress: EpisodeProgress) -> Outcome:
        """What the agent's code comes to, whatever it raises."""
        try:
            return await self._agent(session, progress)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return outcome_of_error(error, progress.reward)  # the code cancelled itself
        except BaseException as error:  # also SystemExit, which must not end the other sessions
            outcome = outcome_of_error(error, progress.reward)
            if outcome.kind == INFRA_FAULT:
                traceback.print_exception(error)
            return outcome

    async def _end_code(self, code: asyncio.Task[Outcome]) -> None:
        code.cancel()
        await asyncio.wait({code}, timeout=LEAVE_S)
        if not code.done():
            self.counts.left_behind += 1
        elif not code.cancelled():
            code.exception()  # it was asked to leave, and what it raised then means nothing

    def _count(self, outcome: Outcome) -> None:
        self.counts.ended[outcome.kind] += 1
        if outcome.kind == INFRA_FAULT:
            self.faults += 1
            self.last_fault = outcome.reason
        else:
            if self.faults >= self._settings.breaker:
                self._note("AgentResumed", {"faults": self.faults})
            self.faults = self._first_pause = self._last_pause = 0
        if self._owner is not None:
            self._owner.progressed({"sessions": sum(self.counts.ended.values())})

    # -- sessions that go elsewhere ------------------------------------------------------------------

    def lose(self, sessions: set[str]) -> None:
        """Stop these, which are not this worker's any more."""
        for running in list(self._running.values()):
            if running.session.id in sessions and not (running.is_lost or running.is_ending):
                running.is_lost = True
                self.counts.lost += 1
                running.task.cancel()

    async def _leave(self) -> None:
        """Interrupt all sessions, and see their code leave."""
        self.interrupted = list(self._running)
        tasks = [one.task for one in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_S + 1.0)


async def keep_beating(
    client: SessionClient, held: Callable[[], list[str]], on_lost: Callable[[set[str]], None]
) -> None:
    """Tell the manager every few seconds what runs here, until cancelled; `on_lost(ids)` hears what does not any more.
    While the manager is away nobody is told, and nothing is lost."""
    while True:
        told = held()
        with contextlib.suppress(TimeoutError):
            lost = await client.beat(told)
            if lost & set(told):
                on_lost(lost & set(told))
        await asyncio.sleep(BEAT_EVERY_S)


async def hand_back(client: SessionClient, claims: Sequence[str]) -> None:
    """Say that this worker runs nothing any more, these claims neither, so that its sessions need not be waited for."""
    with contextlib.suppress(TimeoutError, GyreError):  # then they are handed out after its silence
        await client.beat([], claims)
