"""Reads the join tokens that the journal has: every so often, and when somebody shows one that is not known.

Invariant *made means good*: who shows a token is refused as unknown only after a read that began once it was shown.
Strangers bring about no more than a read in `AGAIN_S`: who comes meanwhile waits for the next.

This module must not know about sockets or what a token may do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from gyre.errors import StoreError

AGAIN_S = 0.1
"""Between two reads that somebody waits for. A read takes about a millisecond of the store."""

WITHIN_S = 10.0
"""For a read that somebody waits for: a store that is busy for longer would hold callers."""


class TokenReader:
    """`read` returns the rows, on a thread of its own, and `update` takes them in. `now` is monotonic."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, Mapping[str, Any]]],
        update: Callable[[Mapping[str, Mapping[str, Any]]], None],
        *,
        now: Callable[[], float],
    ) -> None:
        self._read = read
        self._update = update
        self._now = now
        self._next: asyncio.Task[None] | None = None
        """The read that has not begun."""
        self._begun: set[asyncio.Task[None]] = set()
        self._began_at = float("-inf")

    async def read(self) -> None:
        """Read now. A store that does not answer changes nothing: what is known holds until the next read."""
        self._began_at = self._now()
        with contextlib.suppress(StoreError):
            self._update(await asyncio.to_thread(self._read))

    async def anew(self) -> None:
        """Wait for a read that begins after this call; many callers share one. Returns in time without one, too."""
        if self._next is None:
            self._next = asyncio.create_task(self._later())
            self._begun.add(self._next)
            self._next.add_done_callback(self._begun.discard)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                await asyncio.shield(self._next)

    def close(self) -> None:
        for task in self._begun:
            task.cancel()

    async def _later(self) -> None:
        await asyncio.sleep(max(0.0, self._began_at + AGAIN_S - self._now()))
        self._next = None
        await self.read()
