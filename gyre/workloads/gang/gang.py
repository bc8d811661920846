"""Calls to a gang: every rank at once, all of them or none.

The ranks of a gang are peers of a collective, so one call goes to all of them and has ended when all have
answered. If one of them dies the others fail too, with whatever their collective library raises; those
failures are symptoms, and the death, which may be heard of a moment later, is the cause. If one of them raises and
lives, the others may wait for it in a collective for as long as their library likes: nobody waits for them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from gyre.errors import Fenced, VertexDied
from gyre.workloads.owner import NOBODY, SeesWaits
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.membership import Member, Membership
from gyre.workloads.vertex.messages import Failure
from gyre.workloads.vertex.transport import NO_KEYWORDS, VertexTransport

SETTLE_S = 2.0
"""How long a failed gang call waits to hear of a dead peer before a surviving rank is blamed."""

PEERS_S = 5.0
"""How long the others of a rank that failed have to end the same call. Those that fail for the same reason do so
together; one that takes longer is taken to wait in a collective."""

Outcome = tuple[str, Any]


class GangLost(Exception):
    """The gang cannot go on as it is. `blamed` is None where a rank died: the master knows of that by itself. `ended`
    is whether every rank lives and has left the call, so that another may be made."""

    def __init__(self, blamed: tuple[Member, str, Failure] | None = None, *, ended: bool = False) -> None:
        super().__init__(blamed)
        self.blamed = blamed
        self.ended = ended


def operator_failed(member: Member, operator: str, failure: Failure, attempt: int = 0) -> dict[str, Any]:
    """The body of the event `OperatorFailed` that tells the master whom to replace."""
    return {
        "vertex": member[0],
        "vertex_incarnation": member[1],
        "operator": operator,
        "error": failure.error,
        "traceback": failure.traceback,
        "user_code": failure.user_code,
        "attempt": attempt,
        "code": failure.code,
        "place": failure.place,
        "method": failure.method,
    }


@dataclass(frozen=True, slots=True)
class Gang:
    """A role's ranks, in rank order, as one caller sees them. `number` tells one gang from its successors."""

    number: int
    role: str
    members: tuple[Member, ...]
    membership: Membership
    transport: VertexTransport
    owner: SeesWaits = NOBODY
    """Sees when a call is waited for."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.members)

    def submit(
        self,
        method: str,
        per_rank: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
        *,
        info: CallInfo = NOTHING_OFFERED,
        bundle: Any = None,
    ) -> list[Future[Outcome]]:
        """To every rank, each with its positional arguments. The call's number goes with it, by which a rank that was
        not given it is found out."""
        info = replace(info, gang_call=(self.number, next(self._numbers)))
        return [
            self.transport.submit(*member, method, args, kwargs, info=info, bundle=bundle)
            for member, args in zip(self.members, per_rank, strict=True)
        ]

    def gather(self, method: str, futures: Sequence[Future[Outcome]], *, timeout_s: float) -> list[Any]:
        """Wait for every rank, or for the first ones where there are fewer futures. Raises GangLost, with whom to
        blame where no rank died, and Fenced."""
        deadline, missing = time.monotonic() + timeout_s, [*futures]
        with self.owner.waiting():
            while missing and (left_s := deadline - time.monotonic()) > 0:
                wait(missing, left_s, return_when=FIRST_COMPLETED)
                if any(_has_failed(future) for future in missing):
                    deadline = min(deadline, time.monotonic() + PEERS_S)
                missing = [future for future in missing if not future.done()]
        outcomes = [outcome_of(future) if future.done() else None for future in futures]
        if missing and not any(is_failure(got) for got in outcomes):
            late = self.members[outcomes.index(None)]
            text = f"{method} did not return within {timeout_s:g} s"
            raise GangLost((late, method, Failure(error=text, traceback="", user_code=False)))
        return self.settle(method, outcomes)

    def settle(self, method: str, outcomes: Sequence[Outcome | VertexDied | None]) -> list[Any]:
        """The values of a call that has ended on every rank; or, where it is None on some, that has failed on others.
        Raises as `gather`."""
        members = self.members[: len(outcomes)]
        lost = [member for member, got in zip(members, outcomes, strict=True) if isinstance(got, VertexDied)]
        for member in lost:
            self.membership.doubt(*member)
        if lost:
            raise GangLost
        failures = [
            (member, method, got[1])
            for member, got in zip(members, outcomes, strict=True)
            if isinstance(got, tuple) and got[0] == "error"
        ]
        if not failures:
            return [got[1] for got in outcomes if isinstance(got, tuple)]
        for _, _, failure in failures:
            if failure.fenced:
                raise Fenced(failure.error)
        if all(failure.collective or not failure.user_code for _, _, failure in failures):
            self._await_a_death()
        # A rank with an error of its own explains more than one that only lost its peer.
        blamed = min(failures, key=lambda found: found[2].collective)
        raise GangLost(blamed, ended=None not in outcomes)

    def _await_a_death(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            if not self.is_current():
                raise GangLost
            time.sleep(0.05)

    def is_current(self) -> bool:
        """Whether the membership still has exactly these incarnations."""
        return tuple(self.membership.members(self.role)) == self.members


def is_failure(got: Outcome | VertexDied | None) -> bool:
    return isinstance(got, VertexDied) or (got is not None and got[0] == "error")


def _has_failed(future: Future[Outcome]) -> bool:
    return future.done() and is_failure(outcome_of(future))


def outcome_of(future: Future[Outcome]) -> Outcome | VertexDied:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, VertexDied):
        return error
    raise error
