"""Group commit of the rollout manager's ledger: one thread writes one batch after another.

Invariants:
- *grouped*: what happens within an interval is one transaction. The interval is cut short where a complete group waits
  for it or something is due, and ends at once where nothing can come that would go with it;
- *in order*: one batch is written at a time, and the loop hears of its commit before the next is collected;
- *a full disk loses nothing*: a batch that finds no room is kept, and written when there is some.

This module must not know what is in a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from gyre.errors import StoreFull

Collected = TypeVar("Collected")

FULL_PAUSE_S = 1.0
"""Between two attempts to write on a full disk, which people or the job have to free."""


def _give_way() -> None:
    """Lower the priority of the ledger's thread: it may be late by milliseconds, the loop may not, and they may share a
    core."""
    with contextlib.suppress(OSError, AttributeError):  # where threads have no priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)


class GroupCommit(Generic[Collected]):
    """`collect` returns what is to be written, None for nothing; `write` writes it, on the ledger's thread; `committed`
    is called on the loop afterwards."""

    def __init__(
        self,
        collect: Callable[[], Collected | None],
        write: Callable[[Collected], None],
        committed: Callable[[Collected], None],
        *,
        interval_s: float,
        urgent_s: float,
    ) -> None:
        self.count = 0
        self.thread = ThreadPoolExecutor(1, "gyre-rollout-ledger", initializer=_give_way)
        self._collect = collect
        self._write = write
        self._committed = committed
        self._interval_s = interval_s
        self._urgent_s = urgent_s
        self._soon = asyncio.Event()
        self._now = asyncio.Event()
        self._at_once = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """There is something for the ledger."""
        self._soon.set()

    def within(self, seconds: float) -> None:
        """There is something that is to be written after so long at the latest, if nothing urgent takes it along."""
        self._soon.set()
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(seconds, self.now)

    def now(self) -> None:
        """There is something that somebody waits for."""
        self._now.set()
        self._soon.set()

    def at_once(self) -> None:
        """There is something that somebody waits for, and nothing can come that could go with it."""
        self._at_once.set()
        self.now()

    async def run(self) -> None:
        while True:
            if not self._now.is_set():
                await self._soon.wait()
                # `wait_for` would forget to be cancelled where somebody says `now` at that moment.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._now.wait()
            if self._now.is_set() and not self._at_once.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._urgent_s):
                        await self._at_once.wait()
            if self._due is not None:
                self._due.cancel()
                self._due = None
            self._at_once.clear()
            self._now.clear()
            self._soon.clear()
            if (batch := self._collect()) is None:
                continue
            await self._write_with_room(batch)
            self.count += 1
            self._committed(batch)

    async def _write_with_room(self, batch: Collected) -> None:
        """Write the batch, again and again while the disk has no room: what was rolled back is written whole, and
        nobody hears of it before."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self.thread, self._write, batch)
                return
            except StoreFull as error:
                print(f"the ledger waits: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(FULL_PAUSE_S)

    async def last(self) -> None:
        """Write what is left, after `run` has ended."""
        if (batch := self._collect()) is not None:
            await asyncio.get_running_loop().run_in_executor(self.thread, self._write, batch)

    def close(self) -> None:
        self.thread.shutdown()
