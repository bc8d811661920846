"""Jobs and the room that other jobs hold: the queue of those that wait, and a job's first start.

Invariants:
- *first come, first served*: while a job waits for room that others hold, no job that came later takes room that it
  does not have yet, neither to begin nor to grow. What a running job needs to go on (a vertex that died or was drained)
  it takes all the same;
- *whole or not at all*: a job that begins starts no vertex while one that it needs has no place because other jobs hold
  the room. So what it holds can be given back at once: of two jobs that begin at the same moment, each with room for
  one of them only, the first has all of it, and not each a half for ever.

A job that would find no room though all others ended waits for machines: it holds nobody up, and the rest of it starts
meanwhile. Jobs see one another where they have one store and one Ray cluster. This module must not ask the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from gyre.clock import Clock
from gyre.errors import StoreError
from gyre.store import QueuedJob

LOOK_AGAIN_S = 1.0
"""How long an answer of the store is believed: many vertices that start together ask together."""


class Waiting(Protocol):
    """A store, as far as the queue needs it."""

    def queue(self, ray_address: str | None, now: float) -> Sequence[QueuedJob]:
        """The jobs that wait for room that others hold, the longest waiting first."""


class RoomQueue:
    """The queue as one job sees it. `store` has the jobs in it, of the cluster at `ray_address`."""

    def __init__(self, job_id: str, store: Waiting, ray_address: str | None, clock: Clock) -> None:
        self._waiting: dict[str, float] = {}
        """The job's own vertices that wait for room that others hold, and since when."""
        self._job_id = job_id
        self._store, self._ray_address = store, ray_address
        self._clock = clock
        self._seen: tuple[float, Sequence[QueuedJob]] | None = None
        self._looking = asyncio.Lock()

    @property
    def since(self) -> float | None:
        """Since when the job is in the queue, in seconds since 1970; None while it is not."""
        return min(self._waiting.values(), default=None)

    def wait(self, vertices: Sequence[str], since: float) -> None:
        """Note that these vertices wait for room that others hold."""
        for vertex in vertices:
            self._waiting.setdefault(vertex, since)

    def leave(self, vertices: Sequence[str]) -> None:
        """Note that they do not, or no longer."""
        for vertex in vertices:
            self._waiting.pop(vertex, None)

    async def first(self) -> QueuedJob | None:
        """Returns the job that is to be served before this one takes any more room; None where it is its turn."""
        async with self._looking:  # in the order in which they ask
            now = self._clock.time()
            if self._seen is None or now - self._seen[0] >= LOOK_AGAIN_S:
                try:
                    self._seen = now, await asyncio.to_thread(self._store.queue, self._ray_address, now)
                except StoreError:  # a database that is locked for seconds must not keep a job from its room
                    self._seen = now, ()
        mine = (self.since if self.since is not None else now, self._job_id)
        others = (one for one in self._seen[1] if one.job_id != self._job_id)
        return next((one for one in others if (one.since, one.job_id) < mine), None)


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
