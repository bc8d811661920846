"""What becomes of an operator's result: refused with the reason, or merged into the groups.

A group whose last result is accepted is scored: it goes to the ledger, and may be trained from then on.

Invariants:
- *no old weights*: in order, every token that an operator returns is checked against the staleness bound;
- *a firing is repeated as a whole*: after a failure, with the same groups, on whichever vertex has room.

This module must not know who ran the operator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from gyre.errors import Fenced
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import operator_failed
from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.firings.result_checks import problem_with_groups, problem_with_versions
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure


class KeepsGroups(Protocol):
    def acknowledge(self, ids: Sequence[int], /) -> None:
        """The ledger has these groups with their scored samples."""


class FiringResults:
    """`keeper` keeps groups until they are acknowledged; None where nobody does."""

    def __init__(
        self,
        graph: JobGraph,
        flow: Flow,
        groups: GroupState,
        retries: Retries,
        *,
        max_staleness: int,
        reports: HearsEvents,
        keeper: KeepsGroups | None,
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._groups = groups
        self._retries = retries
        self._max_staleness = max_staleness
        self._reports = reports
        self._keeper = keeper

    def problem_with(self, firings: Sequence[Firing], ids: Sequence[int], value: Any) -> Failure | None:
        """Why the value that an operator returned for these groups is refused; None where it is accepted."""
        operator, user_code = firings[0].operator, True
        problem = problem_with_groups(operator, value, ids, self._groups.by_id)
        if problem is None and self._graph.in_order:
            # Not the user's fault: a load that failed left an older policy behind, and it will be loaded again.
            step = self._graph.step_of(firings[0], self._groups.step)
            problem, user_code = problem_with_versions(value, step - 1 - self._max_staleness), False
        if problem is None:
            return None
        return Failure(error=f"{operator}: {problem}.", traceback="", user_code=user_code)

    def accept(self, firings: Sequence[Firing], groups: Sequence[Group]) -> None:
        """Merge the groups that an operator returned, and complete its firings."""
        self._groups.merge(groups)
        self._retries.succeeded(firings[0].operator)
        for firing in firings:
            self._retries.succeeded((firing.operator, firing.index))
            self._flow.complete(firing)
        if not self._graph.ends_scoring(firings[0].operator):
            return
        scored = [
            group.id for group in groups if self._graph.is_scored(self._flow, self._groups.slot_of(group.id))
        ]
        self._groups.record_scored([group_id for group_id in scored if group_id in self._groups.unscored])
        if scored and self._keeper is not None:
            self._keeper.acknowledge(scored)

    def fail(self, firings: Sequence[Firing], member: Member, failure: Failure) -> None:
        """Report a failed call, and repeat its firings after a pause. Raises Fenced."""
        if failure.fenced:
            raise Fenced(failure.error)
        now, operator = time.monotonic(), firings[0].operator
        attempts = [self._retries.failed(operator, now)]
        attempts += [self._retries.failed((operator, firing.index), now) for firing in firings]
        self._reports.report("OperatorFailed", **operator_failed(member, operator, failure, max(attempts)))
        for firing in firings:
            self._flow.cancel(firing)
