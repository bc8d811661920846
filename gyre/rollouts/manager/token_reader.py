"""Reads the join tokens that the journal has: every so often, and when somebody shows one that is not known.

Invariant *made means good*: who shows a token is refused as unknown only after a read that began once it was shown.
Strangers bring about no more than a read in `AGAIN_S`: who comes meanwhile waits for the next.

This module must not know about sockets or what a token may do.
"""

from __future__ import annotations

import asyncio
import contextlib

from gyre.clock import Clock
from gyre.config import JOIN_TOKEN
from gyre.errors import StoreError
from gyre.rollouts.manager.join_tokens import JoinTokens
from gyre.store import RolloutStore

AGAIN_S = 0.1
"""Between two reads that somebody waits for. A read takes about a millisecond of the store."""

WITHIN_S = 10.0
"""For a read that somebody waits for: a store that is busy for longer would hold callers."""


class TokenReader:
    """Reads the rows of `store` into `tokens`."""

    def __init__(self, store: RolloutStore, tokens: JoinTokens, clock: Clock) -> None:
        self._store = store
        self._tokens = tokens
        self._clock = clock
        self._next: asyncio.Task[None] | None = None
        """The read that has not begun."""
        self._begun: set[asyncio.Task[None]] = set()
        self._began_at = float("-inf")

    def load(self) -> None:
        """Read in this thread. Raises StoreError."""
        self._tokens.update(self._store.snapshot_rows(JOIN_TOKEN))

    async def read(self) -> None:
        """Read now, on a thread of its own. A store that does not answer changes nothing: what is known holds until the
        next read."""
        self._began_at = self._clock.monotonic()
        with contextlib.suppress(StoreError):
            self._tokens.update(await asyncio.to_thread(self._store.snapshot_rows, JOIN_TOKEN))

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
        await asyncio.sleep(max(0.0, self._began_at + AGAIN_S - self._clock.monotonic()))
        self._next = None
        await self.read()
