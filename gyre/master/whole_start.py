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
from collections.abc import Iterable, Sequence
from enum import Enum


class _Place(Enum):
    ASKED = "asked"
    TAKEN = "taken"
    HELD_BY_OTHERS = "held_by_others"


class WholeStart:
    """Who is being started that the job needs, and who of them has a place. In virtual time as well as in real time."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._changed = asyncio.Event()

    def ask(self, vertices: Iterable[str]) -> None:
        """Note that these are being started, and that the job needs them."""
        for vertex in vertices:
            self._places.setdefault(vertex, _Place.ASKED)

    def placed(self, vertices: Iterable[str]) -> None:
        """Note that these have places, or wait for a machine that no other job holds: neither holds others up."""
        self._note(vertices, _Place.TAKEN)

    def without_room(self, vertices: Iterable[str]) -> None:
        """Note that these have no place, because of other jobs."""
        self._note(vertices, _Place.HELD_BY_OTHERS)

    def leave(self, vertices: Iterable[str]) -> None:
        """Note that these start, or no longer do."""
        for vertex in vertices:
            self._places.pop(vertex, None)
        self._tell()

    async def missing(self, timeout_s: float) -> Sequence[str]:
        """Returns the vertices without a place, in order; empty when all have one. Waits until that is known of all, at
        most `timeout_s`, after which those of whom it is not known count as without."""
        await asyncio.sleep(0)  # who waits already goes first: they start in the order in which they asked
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while _Place.ASKED in self._places.values():
                    await self._changed.wait()
        return sorted(vertex for vertex, place in self._places.items() if place is not _Place.TAKEN)

    def _note(self, vertices: Iterable[str], place: _Place) -> None:
        for vertex in vertices:
            if vertex in self._places:
                self._places[vertex] = place
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
