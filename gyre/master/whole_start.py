"""A job's first start: all vertices that it needs have places before any is started.

Invariant *whole or not at all*: a job that begins starts no vertex while one that it needs has no place because other
jobs hold the room. So what it holds can be given back at once: of two jobs that begin at the same moment, each with
room for one of them only, the first has all of it, and not each a half for ever.

Where there would be no room even if all other jobs ended, a machine is waited for, and the rest starts meanwhile. This
module must not ask the cluster or the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence


class WholeStart:
    """Who is being started that the job needs, and who of them has a place. In virtual time as well as in real time.

    What a call costs grows with its own vertices, and not with the job's.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        """All who are being started that the job needs."""
        self._asked: set[str] = set()
        """Those of whom it is not known whether they have a place."""
        self._without: set[str] = set()
        """Those without a place, because of other jobs."""
        self._told = asyncio.Event()
        """Set while nobody is in `_asked`."""
        self._told.set()
        self._turn = asyncio.Lock()
        """They start in the order in which they asked."""

    def ask(self, vertices: Iterable[str]) -> None:
        """Note that these are being started, and that the job needs them."""
        new = set(vertices) - self._known
        self._known |= new
        self._asked |= new
        self._tell()

    def placed(self, vertices: Collection[str]) -> None:
        """Note that these have places, or wait for a machine that no other job holds: neither holds others up."""
        self._without.difference_update(vertices)
        self._asked.difference_update(vertices)
        self._tell()

    def without_room(self, vertices: Collection[str]) -> None:
        """Note that these have no place, because of other jobs."""
        self._without.update(self._known.intersection(vertices))
        self._asked.difference_update(vertices)
        self._tell()

    def leave(self, vertices: Collection[str]) -> None:
        """Note that these start, or no longer do."""
        for one in (self._known, self._asked, self._without):
            one.difference_update(vertices)
        self._tell()

    async def missing(self, timeout_s: float) -> Sequence[str]:
        """Returns the vertices without a place, in order; empty when all have one. Waits until that is known of all, at
        most `timeout_s`, after which those of whom it is not known count as without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._turn:
                while self._asked:
                    await self._told.wait()
        return sorted(self._asked | self._without)

    def _tell(self) -> None:
        if self._asked:
            self._told.clear()
        else:
            self._told.set()
