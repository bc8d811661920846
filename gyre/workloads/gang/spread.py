"""Calls that are spread over a gang: every rank gets a share of the groups, and the results are put together again.

A critic computes values in this way.

Invariants:
- *one gang's*: a call belongs to the gang that it was sent to; when that gang is lost nobody waits for the call any
  more, and its firings may be sent to the next gang;
- *complete*: the groups are returned when every rank has returned its share, in the order in which they were given.

This module must not know what is called, or what becomes of the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gyre.errors import VertexDied
from gyre.graph.elements import Operator
from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import PEERS_S, Outcome, is_failure, outcome_of
from gyre.workloads.gang.learner_gang import LearnerGang
from gyre.workloads.vertex.returns import Expected

CALLS_PER_GANG = 2
"""Calls that a gang has at a time: one in work, one waiting, so that the ranks never idle for a round trip."""


@dataclass(slots=True, eq=False)
class SpreadCall:
    """`ids` are the groups that the firings take, in order."""

    method: str
    firings: list[Firing]
    ids: list[int]
    gang: LearnerGang
    outcomes: list[Outcome | VertexDied | None]
    failed_at: float | None = None
    """When the first rank failed, in monotonic seconds, while others have not ended."""


class HearsRanks(Protocol):
    def rank_answered(self, call: SpreadCall, rank: int, outcome: Outcome | VertexDied) -> None:
        """A rank has ended its share. On the transport's thread."""


class SpreadCalls:
    def __init__(self, owner: HearsRanks) -> None:
        self._owner = owner
        self._calls: list[SpreadCall] = []

    def has_room(self, role: str) -> bool:
        return sum(call.gang.role == role for call in self._calls) < CALLS_PER_GANG

    def send(
        self,
        gang: LearnerGang,
        operator: Operator,
        firings: Sequence[Firing],
        ids: Sequence[int],
        shares: Sequence[list[Group]],
        *,
        step: int,
        expected: Expected | None = None,
    ) -> None:
        """`shares` are the ranks' groups, together those of `ids`; `expected` is what the ranks check. A rank with an
        empty share is called too, since the others may be its peers in a collective."""
        call = SpreadCall(operator.method, list(firings), list(ids), gang, [None] * gang.size)
        self._calls.append(call)
        sent = gang.fire(operator, shares, step=step, index=firings[0].index, expected=expected)
        for rank, future in enumerate(sent.futures):
            future.add_done_callback(partial(self._rank_ended, call, rank))

    def _rank_ended(self, call: SpreadCall, rank: int, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._owner.rank_answered(call, rank, outcome_of(done))

    def is_current(self, call: SpreadCall) -> bool:
        """Whether the call is still waited for, rather than one to a gang that was lost."""
        return call in self._calls

    def results_of(self, call: SpreadCall) -> Any:
        """The groups that the ranks returned, in the order of `ids`; None while some ranks have not returned. Where a
        rank returned no list, what all of them returned. Raises like `Gang.settle`."""
        if any(got is None for got in call.outcomes):
            if call.failed_at is None and any(is_failure(got) for got in call.outcomes):
                call.failed_at = time.monotonic()
            return None
        values = call.gang.settle(call.method, call.outcomes)
        self._calls.remove(call)
        if not all(isinstance(value, list) for value in values):
            return values  # the caller says what is wrong with it
        order = {group_id: at for at, group_id in enumerate(call.ids)}

        def place(group: Any) -> int:
            return order.get(group.id, len(order)) if isinstance(group, Group) else len(order)

        return sorted((group for value in values for group in value), key=place)

    def check_failed(self, now: float) -> None:
        """Raises like `Gang.settle` for a call that one rank failed and others have not left within `PEERS_S`."""
        for call in self._calls:
            if call.failed_at is not None and now - call.failed_at >= PEERS_S:
                call.gang.settle(call.method, call.outcomes)

    def give_up(self) -> list[Firing]:
        """The gangs are lost: forget their calls, and return the firings that were sent."""
        firings = [firing for call in self._calls for firing in call.firings]
        self._calls.clear()
        return firings
