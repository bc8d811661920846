"""The engine beside an agent: started over a policy version, updated, put to sleep, watched and ended.

Its start takes minutes on a GPU, and the first version is made meanwhile, or a version is fetched from another machine.
So it may begin early, over the folder that the first version is trained from.

Invariants:
- *verified before it serves*: an engine may start while its folder is verified, and is nobody's before that is done;
- *armed before it has work*: an engine's loader is in place before the engine is given a sample;
- *early is not served*: an engine that was started early is nobody's before it has loaded a version; one that cannot
  is replaced by one that is started over that version;
- *an adapter pauses nothing*: of a version that is an adapter alone the engine serves the model's folder, takes the
  adapter beside earlier ones, and each sample ends under the one that it was asked with;
- *an engine that does not work is dead*: an engine that answers and fails, or does not take its memory back, is ended
  and handled like one that died.

This module must not know about samples, frames or the manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gyre.clock import Clock
from gyre.engines.errors import (
    EngineError,
    EngineFailed,
    EngineNotStarted,
    EngineRefused,
    EngineTimeout,
)
from gyre.engines.http_client import EngineClient
from gyre.engines.last_words import last_words
from gyre.engines.process import EngineCommand, EngineDeath, EngineProcess
from gyre.engines.weight_loading import EngineLoader, LoadReport
from gyre.errors import GyreError
from gyre.logs.output import LineWriter, engine_lines
from gyre.models.adapters import base_of, is_adapter, read_adapter_config
from gyre.rollouts.agent.engine_adapters import EngineAdapters
from gyre.rollouts.agent.engine_sleep import fall_asleep, wake_up
from gyre.rollouts.agent.owner import Check, Commands, HasEngine
from gyre.rollouts.protocol.frames import Asleep, Awake
from gyre.weights.version.model_folder import fingerprint, same_config

ENGINE_STOP_S = 1.0
"""How long an engine may take to stop by itself. It has nothing to save."""

EARLY = "early"
"""The version of an engine over a model that is nobody's policy: of one that was started early, until it has loaded a
version, and of one that serves adapters."""

Load = Callable[["_Started"], Awaitable[object]]
"""Loads a version into an engine that has not served yet."""


@dataclass(frozen=True, slots=True)
class _Started:
    """An engine that is ready, with its loader armed."""

    engine: EngineProcess
    client: EngineClient
    loader: EngineLoader
    adapters: EngineAdapters
    command: EngineCommand


class EngineHost:
    """The engine of an agent, `owner`. `base` is this machine's folder of the model, where another one than the
    trainer's."""

    def __init__(
        self,
        commands: Commands,
        owner: HasEngine,
        *,
        ready_within_s: float,
        clock: Clock,
        base: Path | None = None,
    ) -> None:
        self.engine: EngineProcess | None = None
        self.engines: list[EngineProcess] = []
        """All engines that may still have a process."""
        self.client: EngineClient | None = None
        self.loader: EngineLoader | None = None
        self.adapter = ""
        """The adapter that requests name; "" for none."""
        self.model = "unset"
        """Fingerprint of the engine's model without its weights."""
        self.given = -1
        """The newest version that an engine of this agent was given."""
        self.counts_from = -1
        """The version that serves a new request, if the engine counts the tokens of each version; else -1."""
        self.reads_apart = False
        """Whether the engine draws no tokens while it reads prompts."""
        self.sick = ""
        """Why we ended the engine."""
        self.is_asleep = False
        """Whether the engine is idle between windows, and has given its memory back if it can."""
        self._released = False
        self._adapters: EngineAdapters | None = None
        self._stands_on = ""
        """What the adapters say of the model beside them."""
        self._base = base
        self._early: tuple[Path, asyncio.Task[_Started]] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_closing = False
        self._commands = commands
        self._owner = owner
        self._ready_within_s = ready_within_s
        self._clock = clock

    @property
    def why_disk(self) -> str:
        """Why the engine reads versions from the disk; "" while its loader has them, without an engine, and of one that
        serves adapters."""
        return self.loader.why_not if self.loader is not None and not self.adapter else ""

    async def serve(self, folder: Path, version: str, update_mode: str, check: Check) -> LoadReport | None:
        """Bring the engine to serve this version: start it (and return None), or update it under running samples.
        `check()` verifies the folder where the engine's loader does not, and is awaited before the version is served.

        Raises what `check` does, EngineNotStarted with the engine's last words, another EngineError if the update
        failed, and EngineRefused if the engine goes on with its earlier version."""
        self.given = max(self.given, int(version))
        if is_adapter(folder):
            return await self._serve_adapter(folder, version, check)
        if self.adapter:
            raise EngineRefused(f"Version {version} is a whole model, and the engine serves adapters.")
        if self.engine is not None and self.loader is not None:
            return await self._update(self.loader, folder, version, update_mode, check)
        if self._early is None:
            started = await self._start_verified(folder, version, check)
        else:
            await check()  # it starts meanwhile

            async def load(started: _Started) -> None:
                await started.loader.load(
                    version, folder, keep=False, call_off=self._owner.samples.recall_all
                )

            started = await self._started_early(folder, load) or await self._start(folder, version)
        self._take(started, folder)
        self.counts_from = -1 if started.loader.why_not else int(version)
        return None

    def _take(self, started: _Started, folder: Path) -> None:
        """Serve by this engine from now on. `folder` describes its model."""
        self.engine, self.client, self.loader = started.engine, started.client, started.loader
        self._adapters = started.adapters
        self.reads_apart = started.command.reads_apart
        self._watching = asyncio.create_task(self._watch(started.engine))
        self.model = fingerprint(folder)

    async def _serve_adapter(self, folder: Path, version: str, check: Check) -> LoadReport | None:
        """As `serve`, of a version that is an adapter alone. Raises ModelFolderError too, where the model beside which
        it was trained is not on this machine."""
        await check()
        if self.engine is None:
            base = await asyncio.to_thread(base_of, folder, self._base)

            async def load(started: _Started) -> None:
                await started.adapters.load(version, folder)

            started = await self._started_early(folder, load) or await self._started_with(base, load)
            self._take(started, folder)
            self._stands_on, report = read_adapter_config(folder).model_print, None
        elif self._adapters is not None and self.adapter:
            if read_adapter_config(folder).model_print != self._stands_on:
                raise EngineRefused(
                    f"Version {version} is an adapter of other weights than the engine serves."
                )
            began = self._clock.monotonic()
            try:
                await self._adapters.load(version, folder)
            except EngineRefused:
                raise
            except EngineError as error:
                self.end(f"it did not load version {version}: {error}"[:2000])
                raise
            report = LoadReport(version, "adapter", load_s=self._clock.monotonic() - began)
        else:
            raise EngineRefused(f"Version {version} is an adapter, and the engine serves whole models.")
        self.adapter, self.counts_from = version, int(version)
        return report

    async def _started_with(self, base: Path, load: Load) -> _Started:
        """An engine over `base` with a version loaded. Raises as `_start` and `load`, and leaves no engine then."""
        started = await self._start(base, EARLY)
        try:
            await load(started)
        except BaseException:
            await self._end_unserved(started)
            raise
        return started

    def start_early(self, folder: Path) -> None:
        """Begin to start an engine over a model's folder, for the first version to be loaded into. Does nothing where
        there is an engine, or one that starts."""
        if self.engine is None and not self.engines:
            task = asyncio.create_task(self._start(folder, EARLY))
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody may come for it
            self._early = folder, task

    async def _started_early(self, folder: Path, load: Load) -> _Started | None:
        """The engine that was started early, with the version in `folder` loaded. None if there is none, or it is of no
        use."""
        early, self._early = self._early, None
        if early is None:
            return None
        base, task = early
        try:
            started = await task
        except EngineNotStarted:
            return None  # its last words are in the log; the start over the version is told, and counts
        try:
            if started.engine.death is not None:
                raise started.engine.death.error("It ended before it had a version")
            if not same_config(base, folder):
                raise EngineRefused(f"The policy has another config.json than {base}.")
            await load(started)
        except (GyreError, OSError) as error:
            print(f"the engine that was started early is ended: {error}", file=sys.stderr, flush=True)
            await self._end_unserved(started)
            return None
        except BaseException:
            await self._end_unserved(started)
            raise
        return started

    async def _start_verified(self, folder: Path, version: str, check: Check) -> _Started:
        """An engine over this folder, which is verified while it starts: gigabytes are hashed for seconds. Raises as
        `check` and `_start`, and leaves no engine then."""
        checking = asyncio.ensure_future(check())
        starting = asyncio.ensure_future(self._start(folder, version))
        try:
            await asyncio.wait((checking, starting), return_when=asyncio.FIRST_EXCEPTION)
            await checking  # first: what is wrong in the folder is why an engine did not start
            return await starting
        except BaseException:
            checking.cancel()
            starting.cancel()
            _, started = await asyncio.gather(checking, starting, return_exceptions=True)
            if isinstance(started, _Started):
                await self._end_unserved(started)
            raise

    async def _end_unserved(self, started: _Started) -> None:
        await started.client.close()
        await started.engine.stop()
        self.engines.remove(started.engine)

    async def _start(self, folder: Path, version: str) -> _Started:
        """Start an engine over this folder. Raises EngineNotStarted."""
        command = self._command(folder, version)
        engine = EngineProcess(
            command,
            ready_within_s=self._ready_within_s,
            stop_within_s=ENGINE_STOP_S,
            log=_own_log(),
        )
        self.engines.append(engine)
        client = None
        try:
            await engine.start()
            client = engine.client()
            loader = EngineLoader(client, folder, key=engine.loader_key)
            await loader.arm()  # before the engine has work
            with contextlib.suppress(EngineRefused, EngineFailed, EngineTimeout):  # it can do without
                await client.freeze_gc()
        except BaseException as error:
            if client is not None:
                await client.close()
            await engine.stop()
            self.engines.remove(engine)
            if isinstance(error, EngineError | OSError):
                why = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                raise _not_started(why, engine.tail) from error
            raise
        adapters = EngineAdapters(client, self._owner.samples)
        return _Started(engine, client, loader, adapters, command)

    def _command(self, folder: Path, version: str) -> EngineCommand:
        """The command of an engine over this folder. Raises EngineNotStarted with the traceback if the job's own
        function for it raises."""
        try:
            return self._commands.command(folder, version)
        except Exception as error:  # it may be the user's, and raise anything
            why = f"The engine's command could not be made: {type(error).__name__}: {error}"
            raise _not_started(why, traceback.format_exc()) from error

    async def _update(
        self,
        loader: EngineLoader,
        folder: Path,
        version: str,
        update_mode: str,
        check: Check,
    ) -> LoadReport:
        """Update the engine under running samples, which pause only for the load and go on with the new weights."""
        if update_mode == "handover":
            await self._owner.samples.recall_all()
        try:
            report = await loader.load(
                version,
                folder,
                keep=update_mode == "in_place",
                call_off=self._owner.samples.recall_all,
                changed=partial(self._weights_changed, int(version)),
                check=check,
            )
        except EngineRefused:
            raise
        except EngineError as error:
            self.end(f"it did not load version {version}: {error}"[:2000])
            raise
        self.counts_from = -1 if loader.why_not else int(version)
        return report

    def _weights_changed(self, version: int, made: Mapping[str, int] | None) -> None:
        self.counts_from = version if made is not None else -1
        self._owner.samples.weights_changed(version, made)

    def end(self, why: str) -> None:
        """End an engine that lives and does not work; the rest follows as after a death."""
        engine = self.engine
        if engine is not None and not self.sick:
            self.sick = why
            self._owner.spawn(engine.stop())

    async def fall_asleep(self) -> Asleep:
        said = await fall_asleep(self.client, self._clock)
        self.is_asleep = self.client is not None
        self._released = self.is_asleep and not said.error
        return said

    async def wake_up(self) -> Awake | None:
        """Wake the engine. None if it did not take its memory back and was ended."""
        try:
            said = await wake_up(self.client if self._released else None, self._clock)
        except EngineError as error:
            self.end(f"it did not take its memory again: {error}"[:2000])
            return None
        self.is_asleep = False
        return said

    async def _watch(self, engine: EngineProcess) -> None:
        death = await engine.died()
        if self.engine is not engine or self._is_closing:
            return
        self._owner.spawn(self._gone(engine, death))

    async def _gone(self, engine: EngineProcess, death: EngineDeath) -> None:
        client, self.engine, self.client, self.loader = self.client, None, None, None
        self._adapters, self.adapter, self.is_asleep = None, "", False
        self._owner.engine_lost()
        # Both reasons: requests may fail before the engine's death is noticed, and do not know its cause.
        reason, self.sick = death.reason + (f", after {self.sick}" if self.sick else ""), ""
        if client is not None:
            await client.close()
        await engine.stop()
        self.engines.remove(engine)
        self._owner.engine_died(reason, death.tail)

    def stop_watching(self) -> list[asyncio.Task[Any]]:
        """Stop reporting the engine's death; returns the tasks to cancel and wait for."""
        self._is_closing = True
        tasks = (self._early[1] if self._early is not None else None, self._watching)
        return [task for task in tasks if task is not None]

    async def close(self) -> None:
        early, self._early = self._early, None
        if early is not None and early[1].done() and not early[1].cancelled() and not early[1].exception():
            await (
                early[1].result().client.close()
            )  # where it did not end, the engine is stopped with the others
        for engine in list(self.engines):
            await engine.stop()


class _OwnLog:
    """The log of this process."""

    def __init__(self, lines: LineWriter) -> None:
        self._lines = lines

    def write(self, lines: bytes) -> None:
        self._lines.write(lines)
        self._lines.flush()


def _own_log() -> _OwnLog | None:
    """Where an engine's output goes: into the log of this process, and nowhere where it has none (an agent that was
    started by hand), for then it would be lines of an engine on a person's terminal."""
    lines = engine_lines()
    return _OwnLog(lines) if lines is not None else None


def _not_started(why: str, output: str) -> EngineNotStarted:
    """The error of a failed start, with what the engine said last, which goes to the agent's output, too, if that has
    not got all of it."""
    said, text = last_words(output)
    if text and engine_lines() is None:
        print(f"the engine did not start; it said last:\n{text}", file=sys.stderr, flush=True)
    return EngineNotStarted(
        why,
        hint="See that the engine, its arguments and its Python are right, and that all it needs is installed here."
        if text
        else "It printed nothing: run its command by hand.",
        details={"said": said, "traceback": text},
    )
