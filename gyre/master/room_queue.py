"""The queue of jobs that wait for room which other jobs hold.

Invariant *first come, first served*: while a job waits for room that others hold, no job that came later takes room
that it does not have yet, neither to begin nor to grow. What a running job needs to go on (a vertex that died or was
drained) it takes all the same.

A job that would find no room though all others ended waits for machines, and holds nobody up. Jobs see one another
where they have one store and one Ray cluster. This module must not ask the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gyre.errors import StoreError
from gyre.store import QueuedJob

LOOK_AGAIN_S = 1.0
"""How long an answer of the store is believed: many vertices that start together ask together."""


class RoomQueue:
    """The queue as one job sees it. `look` gives the jobs in it, the longest waiting first."""

    def __init__(
        self, job_id: str, look: Callable[[], Sequence[QueuedJob]], clock: Callable[[], float]
    ) -> None:
        self._waiting: dict[str, float] = {}
        """The job's own vertices that wait for room that others hold, and since when."""
        self._job_id = job_id
        self._look = look
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
            now = self._clock()
            if self._seen is None or now - self._seen[0] >= LOOK_AGAIN_S:
                try:
                    self._seen = now, await asyncio.to_thread(self._look)
                except StoreError:  # a database that is locked for seconds must not keep a job from its room
                    self._seen = now, ()
        mine = (self.since if self.since is not None else now, self._job_id)
        others = (one for one in self._seen[1] if one.job_id != self._job_id)
        return next((one for one in others if (one.since, one.job_id) < mine), None)
