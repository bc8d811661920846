"""A stand-in for Gloo between ranks that are threads of one process."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from gyre.workloads.base import WorkloadContext


class InProcessCollective:
    """The ranks of one generation of a gang. Every rank makes the same calls in the same order."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._condition = threading.Condition()
        self._values: dict[int, Any] = {}
        self._gathered: list[Any] = []
        self._round = 0
        self._broken = False

    def exchange(self, rank: int, value: Any, *, timeout_s: float = 30.0) -> list[Any]:
        """Every rank's value in rank order. Raises ConnectionError, as Gloo does, if a peer was killed or did not come;
        the collective cannot be used after that."""
        with self._condition:
            entered = self._round
            self._values[rank] = value
            if len(self._values) == self.world_size and not self._broken:
                self._gathered = [self._values[peer] for peer in range(self.world_size)]
                self._values = {}
                self._round += 1
                self._condition.notify_all()
            else:
                self._condition.wait_for(lambda: self._broken or self._round > entered, timeout_s)
            if self._round == entered:
                self.break_off()
                raise ConnectionError("Connection closed by peer")
            return self._gathered

    def break_off(self) -> None:
        """Fail all present and later calls, because a rank is dead."""
        with self._condition:
            self._broken = True
            self._condition.notify_all()


_COLLECTIVES: dict[tuple[int, str], InProcessCollective] = {}
"""The collectives by the port that a gang's ranks get, and by role. A dead gang's stays, for ranks that come too
late."""
_LOCK = threading.Lock()
_PORTS = itertools.count(1)


def new_port() -> int:
    return next(_PORTS)


def break_off(port: int, role: str) -> None:
    """Fail all calls of a collective, present and later, because a rank is dead."""
    _collective(port, role, 0).break_off()


def collective_of(context: WorkloadContext) -> InProcessCollective:
    """The collective of a workload in an InProcessJob; a new one if its gang has one rank."""
    if context.world_size == 1 or context.master_port is None:
        return InProcessCollective(context.world_size)
    return _collective(context.master_port, context.role, context.world_size)


def _collective(port: int, role: str, world_size: int) -> InProcessCollective:
    with _LOCK:
        return _COLLECTIVES.setdefault((port, role), InProcessCollective(world_size))
