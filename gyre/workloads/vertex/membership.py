"""Which vertices run, as the trainer knows it: announced by the master, doubted by the trainer itself.

The trainer sees a death on its own calls before the master has announced it. It then doubts that incarnation
and waits for the next one; it never decides by itself that a vertex is back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from gyre.clock import Clock

DOUBT_S = 15.0
"""How long a doubt lasts that no announcement confirms: a connection that broke under a living vertex looks like
a death to one caller and to nobody else, and the master would never replace it."""

Member = tuple[str, int]
"""A vertex id and its incarnation."""


class Membership:
    def __init__(self, clock: Clock = time) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._serial = -1
        self._running: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._doubted: dict[Member, float] = {}
        self._listeners: list[Callable[[], None]] = []

    def announce(self, serial: int, running: dict[str, int], wanted: dict[str, int]) -> None:
        """Announcements may arrive out of order or twice; only a newer one counts."""
        with self._condition:
            if serial <= self._serial:
                return
            self._serial = serial
            self._running = dict(running)
            self._wanted = dict(wanted)
            still = self._running.items()
            self._doubted = {member: at for member, at in self._doubted.items() if member in still}
            self._condition.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def doubt(self, vertex: str, incarnation: int) -> None:
        """A call to this incarnation ended as if it had died. For a while it is given no other."""
        with self._condition:
            if self._running.get(vertex) == incarnation:
                self._doubted[(vertex, incarnation)] = self._clock.monotonic()

    def listen(self, listener: Callable[[], None]) -> None:
        """Called after each newer announcement, on the announcing thread."""
        with self._condition:
            self._listeners.append(listener)

    def members(self, role: str) -> list[Member]:
        """The role's running, undoubted vertices in rank order."""
        with self._condition:
            found = [
                (vertex, incarnation)
                for vertex, incarnation in self._running.items()
                if vertex.rpartition("-")[0] == role and not self._in_doubt((vertex, incarnation))
            ]
        return sorted(found, key=lambda member: int(member[0].rpartition("-")[2]))

    def _in_doubt(self, member: Member) -> bool:
        return self._clock.monotonic() - self._doubted.get(member, -math.inf) < DOUBT_S

    def wanted(self, role: str) -> int:
        with self._condition:
            return self._wanted.get(role, 0)

    def complete(self, role: str) -> list[Member] | None:
        """Every wanted rank of the role, or None while one is missing."""
        found = self.members(role)
        return found if found and len(found) >= self.wanted(role) else None

    def wait_for(
        self, role: str, rank: int | None, deadline: float, *, beyond: int = 0
    ) -> list[Member] | None:
        """Blocks until the role is complete (or its `rank` runs, as incarnation `beyond` or a newer one).

        `deadline` is of the monotonic clock. None where it passed; [] where the rank ran before (`beyond`) and is not
        wanted any more.
        """
        with self._condition:  # from the look to the wait, so that no announcement falls between them
            while True:
                if rank is None:
                    found = self.complete(role)
                else:
                    found = [
                        member
                        for member in self.members(role)
                        if member[0] == f"{role}-{rank}" and member[1] >= beyond
                    ]
                if found:
                    return found
                if rank is not None and beyond and rank >= self._wanted.get(role, 0):
                    return []
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._condition.wait(min(left_s, DOUBT_S))
