"""Firings that one vertex of a role can run alone: each call goes to whichever vertex has room.

The policy that an operator needs travels with the call (`gyre.workloads.trainer.firings.vertex_calls`).

This module must not know which firings are enabled, or what is wrong with a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from gyre.errors import VertexDied
from gyre.graph.elements import Operator
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.samples import Group, InstanceRun
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.workloads.gang.gang import Outcome, outcome_of
from gyre.workloads.trainer.evaluation.evaluations import Evaluations
from gyre.workloads.trainer.firings.result_checks import NOTHING_KNOWN, Expectations
from gyre.workloads.trainer.firings.results import FiringResults
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.inbox_messages import Inbox, VertexCallEnded
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.vertex.membership import Member


@dataclass(frozen=True, slots=True)
class VertexCall:
    """`ids` are the groups that the firings take, in order."""

    firings: list[Firing]
    ids: list[int]
    member: Member


class VertexFirings:
    def __init__(
        self,
        graph: JobGraph,
        flow: Flow,
        groups: GroupState,
        calls: VertexCalls,
        policies: ServedPolicies,
        results: FiringResults,
        evaluations: Evaluations,
        *,
        arrival: ArrivalOrder | None,
        groups_per_call: int,
        inbox: Inbox,
        expectations: Expectations = NOTHING_KNOWN,
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._groups = groups
        self._calls = calls
        self._policies = policies
        self._results = results
        self._evaluations = evaluations
        self._arrival = arrival
        self._groups_per_call = groups_per_call
        self._inbox = inbox
        self._expectations = expectations

    def send(self, operator: Operator, firings: Sequence[Firing], step: int) -> None:
        """Send as many of the firings as vertices have room for; those that evaluate all at once, since each of them is
        several calls."""
        if not firings[0].groups:
            for firing in firings:
                self._evaluations.call(firing)
            return
        takes_weights, policy = self._graph.takes_weights(operator), None
        if takes_weights or operator.initial_policy:
            policy = self._policies.initial if operator.initial_policy else self._policies.published
            if policy is None:
                return
        for some in in_calls(firings, self._groups_per_call):
            member = self._calls.free_member(operator.role)
            if member is None:
                return
            ids = ids_of(some, self._groups)
            groups = [self._groups[group_id] for group_id in ids]
            if self._arrival is not None and policy is not None and takes_weights:
                for group_id in ids:
                    self._arrival.requested(group_id, policy.version)
            for firing in some:
                self._flow.start(firing)
            newest = policy.version if takes_weights and policy is not None else None
            future = self._calls.fire(
                member,
                operator,
                groups,
                step=step,
                index=some[0].index,
                expected=self._expectations.for_groups(operator, newest=newest),
                added_only=any(group.samples for group in groups),
                policy=policy,
            )
            future.add_done_callback(partial(self._call_ended, VertexCall(some, ids, member)))

    def _call_ended(self, call: VertexCall, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._inbox.put(VertexCallEnded(call, outcome_of(done)))

    def ended(self, call: VertexCall, outcome: Outcome | VertexDied) -> None:
        """Handle a call that has ended: accept its result, or repeat its firings. Raises Fenced."""
        firings, member = call.firings, call.member
        self._calls.ended(member)
        if isinstance(outcome, VertexDied):
            self._calls.lost(member)
            for firing in firings:
                self._flow.cancel(firing)
            return
        status, value = outcome
        failure = value if status == "error" else self._results.problem_with(firings, call.ids, value)
        if failure is not None:
            self._calls.failed(member)
            self._results.fail(firings, member, failure)
        else:
            self._sign(value, member)
            self._results.accept(firings, value)

    def _sign(self, value: Sequence[Group], member: Member) -> None:
        """Note who generated the samples that groups had not before."""
        for group in value:
            if not self._groups[group.id].samples:
                for sample in group.samples:
                    count = len(sample.token_ids)
                    sample.instances = (InstanceRun(member[0], 0, count),) if count else ()


def ids_of(firings: Sequence[Firing], groups: GroupState) -> list[int]:
    """The groups that stand in the slots of these firings, in order."""
    return [groups.id_at(slot) for firing in firings for slot in firing.groups]


def in_calls(firings: Sequence[Firing], groups_per_call: int) -> Iterator[list[Firing]]:
    """The firings of one operator, as many together as make `groups_per_call` groups, but at least one."""
    rate = len(firings[0].groups)
    size = max(1, groups_per_call // rate) if rate else 1
    for first in range(0, len(firings), size):
        yield list(firings[first : first + size])
