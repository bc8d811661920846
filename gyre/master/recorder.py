"""What the master keeps of a job beside its journal: its numbers over time, and the keyframes of its journal.

Invariants:
- *beside the loop*: the loop hands over references to a state that never changes and to the last reports, and waits for
  nothing; numbers are packed, and events folded, in one thread of this recorder's own;
- *one at a time*: while a tick is written none is taken, so a slow store makes gaps, and no queue;
- *a lost tick is nothing*: what cannot be written is left out, and while the journal cannot be written nothing is
  tried, so that a full disk's first room is the journal's.

This module must not know what the numbers are, or how they are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from gyre.clock import Clock
from gyre.errors import GyreError
from gyre.failover import JobState
from gyre.master.job_context import JobContext
from gyre.master.owner import KnowsTheStore
from gyre.observe.history import JobHistory
from gyre.observe.series import Recorder, numbers_of, tick_for
from gyre.store import SeriesStore

FOLLOW_FROM = 100
"""Events that the journal is ahead of the keyframes' follower before it is called: each call costs a few queries."""

FOLLOW_MOST = 2000
"""Events that are folded in one tick, in some tenth of a second: a job of before there were keyframes has theirs made
over its next hours, or by its first reader."""

FINISH_WITHIN_S = 10.0
"""How long the end of a job waits for its last tick: a hundred times what it takes."""


class HasTelemetry(Protocol):
    @property
    def telemetry(self) -> Mapping[str, Mapping[str, Any]]:
        """The last report of each vertex, by id."""


class HistoryRecorder:
    """Starts with `start`, ends with `finish`, or with `cancel` where the loop ends."""

    def __init__(
        self,
        series: SeriesStore,
        history: JobHistory,
        context: JobContext,
        reports: HasTelemetry,
        *,
        clock: Clock,
        owner: KnowsTheStore,
    ) -> None:
        self._recorder = Recorder(series)
        self._history = history
        self._context = context
        self._reports = reports
        self._clock = clock
        self._owner = owner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._task: asyncio.Task[None] | None = None
        self._followed = 0
        self._took_s = 0.0
        self._said = ""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def finish(self) -> None:
        """Keep the last moment, if the store takes it in time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_WITHIN_S):
                await self._tick(0.0)

    async def _run(self) -> None:
        while True:
            tick_s = tick_for(self._sources())
            due = self._clock.monotonic() + tick_s - self._clock.time() % tick_s
            await asyncio.sleep(due - self._clock.monotonic())
            await self._tick(self._clock.monotonic() - due)

    def _sources(self) -> int:
        return len(self._context.committed.vertices) * 2 + 3  # an instance is a source beside its vertex

    async def _tick(self, late_s: float) -> None:
        context = self._context
        if self._owner.store_is_lost or context.error or context.committed.job.full_disks:
            return
        master = {
            "seq": float(context.seq),
            "unwritten": float(max(0, context.unwritten and context.unwritten - context.seq)),
            "late_s_max": max(0.0, late_s),
            "recorder_s_max": self._took_s,
        }
        work = (context.committed, dict(self._reports.telemetry), master, self._clock.time(), context.seq)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._keep, *work)

    def _keep(
        self,
        state: JobState,
        telemetry: dict[str, Mapping[str, Any]],
        master: dict[str, float],
        at: float,
        seq: int,
    ) -> None:
        """In the thread."""
        begun = time.perf_counter()
        try:
            master["memory_bytes"] = float(_resident_bytes())
            self._recorder.record(numbers_of(state, telemetry, master=master), at=at)
            if seq - self._followed >= FOLLOW_FROM or state.job.phase.ended:
                folded = self._history.follow(most=FOLLOW_MOST)
                self._followed = seq if folded < FOLLOW_MOST else self._followed + folded
        except GyreError as error:
            self._say(str(error))
        except Exception as error:  # nothing in here is worth a master's life
            self._say("".join(traceback.format_exception(error)))
        self._took_s = time.perf_counter() - begun

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            print(f"the numbers of this moment are not kept: {what}", file=sys.stderr, flush=True)


def _resident_bytes() -> int:
    """What this process has of the machine's memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as told:
            return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
