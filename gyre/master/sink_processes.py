"""The processes of a job's sinks, beside the master: started, started again when they die or hang, never waited for.

They run on the master's machine, for the store may be a file there.

Invariants:
- *nothing waits*: starting and looking are done beside the control loop, and no failure of a sink is one of the job;
- *back-off*: a sink that dies at once is started again after 1 s, 2 s, 4 s and so on up to a minute; one that lived for
  a minute begins anew;
- *a hang is a death*: a sink that shows no life for `HANGS_AFTER_S` is killed, and started again where its cursor is.

This module must not know what a sink does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre.clock import Clock
from gyre.config import JobSpec
from gyre.logs.output import LOG_VARIABLE
from gyre.observe.sinks.notify import NOTIFY, NotifyOptions
from gyre.observe.sinks.process import SinkSettings

LOOK_S = 1.0
END_LOOK_S = 0.1
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LIVED_S = 60.0
HANGS_AFTER_S = 120.0
"""Beyond what the first contact with a tracking server takes, which is tried again inside for a minute and more."""

FINISH_WITHIN_S = 15.0
"""How long the end of a job waits for its sinks to deliver all: a second is common."""


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


Spawn = Callable[[SinkSettings, Path], Process]
"""Starts a sink's process, with its output into this file."""


@dataclass(slots=True)
class _Kept:
    settings: SinkSettings
    process: Process | None = None
    started_at: float = 0.0
    retry_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    done: bool = False


def sinks_of(spec: JobSpec, *, job_id: str, store_url: str, directory: Path) -> list[SinkSettings]:
    """The job's sinks, and whom it notifies, each with a folder of its own in the job's directory."""

    def settings(number: int, kind: str, folder: str, to: str, options: dict[str, Any]) -> SinkSettings:
        return SinkSettings(
            store_url=store_url,
            job_id=job_id,
            number=number,
            kind=kind,
            folder=str(directory / "sinks" / folder),
            parent=os.getpid(),
            to=to,
            options=options,
            python_path=spec.python_path,
        )

    sinks = [
        settings(number, sink.kind, f"{number}-{sink.kind.replace(':', '.')}", sink.to, sink.options)
        for number, sink in enumerate(spec.observe.sinks)
    ]
    alike: Counter[str] = Counter()
    for number, notify in enumerate(spec.observe.notify):
        options = notify.model_dump(mode="json")
        identity = NotifyOptions(**options).identity
        alike[identity] += 1
        ordinal = f"-{alike[identity]}" if alike[identity] > 1 else ""
        sinks.append(settings(number, NOTIFY, f"notify-{identity}{ordinal}", "", options))
    return sinks


def spawn(settings: SinkSettings, output: Path) -> Process:
    path = os.pathsep.join([*settings.python_path, *(folder for folder in sys.path if folder)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        LOG_VARIABLE: str(output.absolute()),
        **settings.as_environment(),
    }
    with open(output, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "gyre.observe.sinks.process"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


class SinkProcesses:
    def __init__(
        self,
        sinks: list[SinkSettings],
        *,
        logs: Path,
        clock: Clock,
        spawn: Spawn = spawn,
    ) -> None:
        """`wall_clock` is that of the file system, which says when a sink last showed life."""
        self._kept = [_Kept(settings) for settings in sinks]
        self._logs = logs
        self._clock = clock
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._kept:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """The processes end by themselves, when this one does."""
        if self._task is not None:
            self._task.cancel()

    async def finish(self) -> None:
        """Let the sinks of a job that has ended tell the rest, for a while. What they are not told, they are told when
        the job is resumed."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for kept in self._kept:  # how the job ended is worth another try, whatever failed before
            kept.pause_s, kept.retry_at = FIRST_PAUSE_S, self._clock.monotonic()
        give_up_at = self._clock.monotonic() + FINISH_WITHIN_S
        while self._clock.monotonic() < give_up_at:
            for kept in self._kept:
                await self._look(kept)
            if all(kept.done or self._is_gone(kept, until=give_up_at) for kept in self._kept):
                return
            await asyncio.sleep(END_LOOK_S)
        for kept in self._kept:
            if kept.process is not None and kept.process.poll() is None:
                kept.process.kill()

    def _is_gone(self, kept: _Kept, *, until: float) -> bool:
        """Whether it is not started again before that time."""
        return kept.process is None and kept.retry_at > until

    async def _run(self) -> None:
        while True:
            for kept in self._kept:
                await self._look(kept)
            await asyncio.sleep(LOOK_S)

    async def _look(self, kept: _Kept) -> None:
        now = self._clock.monotonic()
        if kept.process is not None:
            code = kept.process.poll()
            if code is None:
                if self._silent_s(kept) > HANGS_AFTER_S:
                    self._say(kept, f"hangs for {HANGS_AFTER_S:g} s: killed")
                    kept.process.kill()
                return
            if now - kept.started_at >= LIVED_S:
                kept.pause_s = FIRST_PAUSE_S
            kept.process, kept.done = None, code == 0
            if not kept.done:
                kept.retry_at = now + kept.pause_s
                self._say(kept, f"ended with {code}; it is started again in {kept.pause_s:g} s")
                kept.pause_s = min(2 * kept.pause_s, LONGEST_PAUSE_S)
        if kept.process is None and not kept.done and now >= kept.retry_at:
            output = self._logs / f"{kept.settings.label}.{os.getpid()}.log"
            kept.started_at = now
            try:
                kept.process = await asyncio.to_thread(self._start, kept.settings, output)
            except OSError as error:
                kept.retry_at = now + kept.pause_s
                self._say(kept, f"cannot be started: {error}")
                kept.pause_s = min(2 * kept.pause_s, LONGEST_PAUSE_S)

    def _start(self, settings: SinkSettings, output: Path) -> Process:
        output.parent.mkdir(parents=True, exist_ok=True)
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
        settings.alive_path.touch()
        return self._spawn(settings, output)

    def _silent_s(self, kept: _Kept) -> float:
        try:
            return self._clock.time() - kept.settings.alive_path.stat().st_mtime
        except OSError:
            return 0.0  # its folder was removed: it will end by that itself

    def _say(self, kept: _Kept, what: str) -> None:
        print(f"{kept.settings.label} ({kept.settings.kind}) {what}", file=sys.stderr, flush=True)
