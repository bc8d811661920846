"""An instance started from the command line: an agent with its engine, which works until it is told to leave.

Exit codes: 0 after a drain, 2 if the manager refuses this instance, 3 if the manager cannot be reached or does not
accept the token; an engine that cannot be started is an error of its own.

This module must not know about Ray, or what an engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre.engines.kind import EngineStart
from gyre.engines.process import EngineCommand
from gyre.errors import Unauthorized, Unreachable
from gyre.rollouts.agent.agent import Agent, AgentSettings, JobWishes
from gyre.rollouts.agent.owner import Commands
from gyre.rollouts.engines import engine_named
from gyre.rollouts.protocol.connection import Refused
from gyre.rollouts.protocol.endpoint import Endpoint

LOOK_S = 0.2
"""Interval between looks for the notice file."""


class NotTaken(Refused):
    exit_code = 2


class EngineCommands:
    """The commands of one engine. `model` is the folder with the tokenizer and configuration that published folders
    lack; `extra` may refer to it as `{model}`. What the job wishes is read at each start. Raises ConfigError if the
    user's engine cannot be loaded."""

    def __init__(
        self,
        engine: str,
        *,
        max_running: int | None,
        kv_tokens: int | None,
        wishes: JobWishes | None = None,
        model: Path | None = None,
        python: str | None = None,
        context_length: int | None = None,
        local: bool = False,
        extra: Sequence[str] = (),
    ) -> None:
        self._kind = engine_named(engine)
        self._wishes = wishes or JobWishes()
        self._python = python or sys.executable
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._context_length = context_length
        self._local = local
        self._extra = [part.replace("{model}", str(model or "")) for part in extra]

    def command(self, folder: Path, version: str) -> EngineCommand:
        """Of this engine over a model folder. Raises ConfigError, and what a user's engine raises."""
        return self._kind.start(
            EngineStart(
                folder,
                version,
                self._python,
                max_running=self._max_running,
                kv_tokens=self._kv_tokens,
                context_length=self._context_length,
                deterministic=self._wishes.deterministic,
                turns=self._wishes.turns,
                adapters=self._wishes.adapters,
                local=self._local,
                extra=self._extra,
            )
        )


async def run_agent(
    settings: AgentSettings,
    endpoint: Endpoint,
    commands: Commands,
    *,
    wishes: JobWishes | None = None,
    notice_file: Path | None = None,
    drain_deadline_s: float = 30.0,
    reach_within_s: float = 60.0,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """`wishes` are those that `commands` read. Work until drained, which SIGTERM, SIGINT, the appearance of
    `notice_file` or the manager begins. A second signal ends the work at once. Raises NotTaken, Unauthorized, or
    Unreachable if the manager is away for longer than `reach_within_s`; tokens that have not reached it are lost
    then."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        agent = Agent(settings, endpoint, commands, wishes=wishes)
        work = loop.create_task(agent.run())

        def leave(reason: str) -> None:
            if agent.is_draining:
                work.cancel()
                return
            say(f"{settings.name} drains: {reason}")
            agent.drain(reason, drain_deadline_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave, signal.Signals(number).name)
            stack.callback(loop.remove_signal_handler, number)
        watch = loop.create_task(_watch(agent, leave, notice_file, reach_within_s))
        try:
            done, _ = await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                work.result()
            else:
                watch.result()
        except Refused as error:
            if error.details.get("reason") == "unauthorised":
                raise Unauthorized(error.message, hint=error.hint) from None
            if error.details.get("reason") == "certificate":
                raise NotTaken(error.message, hint=error.hint, details=error.details) from None
            raise NotTaken(
                f"The rollout manager does not take {settings.name}: {error.message}", details=error.details
            ) from None
        except asyncio.CancelledError:
            if not agent.is_draining:  # this task was cancelled, and not the work by a second signal
                raise
        finally:
            for task in (watch, work):
                task.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)


async def _watch(
    agent: Agent, leave: Callable[[str], None], notice_file: Path | None, reach_within_s: float
) -> None:
    """Returns never; raises Unreachable."""
    loop = asyncio.get_running_loop()
    seen = loop.time()
    while True:
        now = loop.time()
        if agent.connected:
            seen = now
        if now - seen > reach_within_s and not agent.is_draining:
            where = agent.where
            raise Unreachable(
                f"The rollout manager{' at ' + where if where else ''} was not reached for {reach_within_s:g} s.",
                hint="Is the job running, and can this machine open that address?",
            )
        if notice_file is not None and not agent.is_draining and notice_file.exists():  # noqa: ASYNC240
            leave(f"{notice_file} appeared")
        await asyncio.sleep(LOOK_S)
