"""A gang as a script's `fit()` calls it: every rank at once, and again as a whole on the gang that replaces it.

Invariants:
- *in step*: before this trainer's first call to a gang, and after a call that failed, the ranks are aligned
  (`gyre.workloads.gang.alignment`). Where an earlier trainer, or this one, could not send a call to all of them, the
  master hears of it and replaces the gang, and the script's call waits for the next one;
- *one order*: calls that are made at the same time reach every rank in the same order;
- *a call is repeated as a whole*: where a rank dies, all ranks of the next gang are called.

This module must not know what the calls do, or how a script words them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gyre.errors import Unreachable
from gyre.workloads.gang.alignment import align
from gyre.workloads.gang.gang import Gang, GangLost, Outcome, operator_failed
from gyre.workloads.owner import HearsEvents, SeesWaits
from gyre.workloads.vertex.membership import Membership
from gyre.workloads.vertex.transport import VertexTransport

Arguments = Sequence[tuple[Any, ...]]
"""The positional arguments of each rank."""


class HasGangs(HearsEvents, SeesWaits, Protocol):
    """What the trainer's runtime is to them."""


class ScriptGang:
    """`numbers` gives each gang a number greater than the last."""

    def __init__(
        self,
        role: str,
        membership: Membership,
        transport: VertexTransport,
        *,
        numbers: Iterator[int],
        owner: HasGangs,
    ) -> None:
        self._role = role
        self._membership = membership
        self._transport = transport
        self._numbers = numbers
        self._owner = owner
        self._lock = threading.Lock()
        self._gang: Gang | None = None
        """The gang that is in step, as far as is known; None before the next alignment."""

    def call(
        self, method: str, arguments: Callable[[int], Arguments], kwargs: Mapping[str, Any], deadline: float
    ) -> list[Any]:
        """Results in rank order. `arguments(size)` returns those of each rank; `deadline` is of the monotonic clock.
        Raises GangLost, with the rank that is to blame, where a rank raised; Unreachable past the deadline; and
        Fenced."""
        while True:
            gang, futures = self._send(method, arguments, kwargs, deadline)
            try:
                return gang.gather(method, futures, timeout_s=deadline - time.monotonic())
            except GangLost as lost:
                self._distrust(gang)
                if time.monotonic() >= deadline:
                    raise self._late(f"{method} did not return") from None
                if lost.blamed is not None:
                    raise

    def _send(
        self, method: str, arguments: Callable[[int], Arguments], kwargs: Mapping[str, Any], deadline: float
    ) -> tuple[Gang, list[Future[Outcome]]]:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late(f"there was no gang to send {method} to")
        try:
            gang = self._gang
            if gang is None or not gang.is_current():
                gang = self._gang = self._aligned_gang(deadline)
            try:
                return gang, gang.submit(method, arguments(gang.size), kwargs)
            except BaseException:
                self._gang = None  # some ranks may have been given it
                raise
        finally:
            self._lock.release()

    def _aligned_gang(self, deadline: float) -> Gang:
        self._gang = None
        while True:
            members = self._membership.wait_for(self._role, None, deadline)
            if members is None or time.monotonic() >= deadline:
                raise self._late("its ranks did not all start")
            number = next(self._numbers)
            gang = Gang(number, self._role, tuple(members), self._membership, self._transport, self._owner)
            try:
                align(gang, timeout_s=deadline - time.monotonic())
                return gang
            except GangLost as lost:
                if lost.blamed is None:
                    continue  # a rank died, and is doubted
                self._owner.report("OperatorFailed", **operator_failed(*lost.blamed))
                self._membership.doubt(*lost.blamed[0])  # until the master has replaced it, and its peers

    def _distrust(self, gang: Gang) -> None:
        """Have the gang aligned again before the next call. This takes no lock, since a thread may hold it for as long
        as a gang takes to start. At worst a new gang is aligned once more than it needs."""
        if self._gang is gang:
            self._gang = None

    def _late(self, what: str) -> Unreachable:
        return Unreachable(
            f"Gang {self._role!r}: {what} within run.call_timeout_s.",
            hint="See `gyre events` for what keeps it from running, or raise run.call_timeout_s if such calls are "
            "meant to take longer.",
        )
