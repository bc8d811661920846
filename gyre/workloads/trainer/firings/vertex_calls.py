"""Calls to any one vertex of a role: which vertex has room, and which policy it holds.

Invariant *no old weights*: a vertex is sent the newest version together with the call that needs it, and is taken to
hold that version until one of its calls fails.

This module must not know which operators there are, or what becomes of a result.
"""

from __future__ import annotations

from concurrent.futures import Future

from gyre.graph.elements import Operator
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome
from gyre.workloads.trainer.learning.publishing import PublishedVersion
from gyre.workloads.vertex.call_info import CallInfo
from gyre.workloads.vertex.membership import Member, Membership
from gyre.workloads.vertex.messages import Failure
from gyre.workloads.vertex.returns import Expected
from gyre.workloads.vertex.slim_groups import SlimGroups, joined
from gyre.workloads.vertex.transport import VertexTransport

CALLS_PER_VERTEX = 2
"""Calls sent to one vertex at a time: one in work, one waiting, so that it never idles for a round trip."""


class VertexCalls:
    def __init__(self, membership: Membership, transport: VertexTransport) -> None:
        self._membership = membership
        self._transport = transport
        self._in_flight: dict[Member, int] = {}
        self._loaded: dict[Member, tuple[int, str]] = {}

    @property
    def roles_at_work(self) -> set[str]:
        """The roles that have a call, also one that is no firing of the graph."""
        return {vertex.rpartition("-")[0] for (vertex, _), count in self._in_flight.items() if count}

    def count(self, role: str) -> int:
        """How many vertices of the role run."""
        return len(self._membership.members(role))

    def free_member(self, role: str) -> Member | None:
        """The running vertex of the role with the fewest calls, or None where every vertex has as many as it may."""
        members = self._membership.members(role)
        if not members:
            return None
        best = min(members, key=lambda member: self._in_flight.get(member, 0))
        return best if self._in_flight.get(best, 0) < CALLS_PER_VERTEX else None

    def fire(
        self,
        member: Member,
        operator: Operator,
        groups: list[Group],
        *,
        step: int,
        index: int,
        expected: Expected,
        slim: bool = False,
        added_only: bool = False,
        policy: PublishedVersion | None = None,
    ) -> Future[Outcome]:
        """Have a vertex run an operator of the graph on these groups. The policy is sent along unless the vertex holds
        it. `expected` is what the vertex checks. With `slim` the operator gets what scoring needs, and no more; with
        `added_only` only what it added travels back. The result has the groups whole."""
        bundle = None
        if policy is not None and self._loaded.get(member) != policy.identity:
            bundle = policy.bundle
            self._loaded[member] = policy.identity
        self._in_flight[member] = self._in_flight.get(member, 0) + 1
        info = CallInfo(step=step, index=index, expected=expected, added_only=added_only)
        given = SlimGroups.of(groups) if slim else groups
        answer = self._transport.submit(*member, operator.method, (given,), info=info, bundle=bundle)
        return _whole(answer, groups) if added_only else answer

    def ended(self, member: Member) -> None:
        """A call to the vertex has ended, in whatever way."""
        self._in_flight[member] = max(0, self._in_flight.get(member, 0) - 1)

    def failed(self, member: Member) -> None:
        """A call that has ended failed, so it is unknown which policy the vertex holds."""
        self._loaded.pop(member, None)

    def lost(self, member: Member) -> None:
        """A call that has ended did so as if the vertex had died."""
        self._membership.doubt(*member)
        self.failed(member)


def _whole(answer: Future[Outcome], groups: list[Group]) -> Future[Outcome]:
    """The outcome with what an operator added to these groups joined to them."""
    whole: Future[Outcome] = Future()

    def finish(done: Future[Outcome]) -> None:
        error = done.exception()
        if error is not None:
            whole.set_exception(error)
            return
        status, value = done.result()
        try:
            outcome = status, joined(groups, value)
        except Exception as error:  # whatever is in an answer: without an outcome the call would never end
            text = f"what it returned cannot be read: {type(error).__name__}: {error}"
            outcome = "error", Failure(error=text, traceback="", user_code=True)
        whole.set_result(outcome)

    answer.add_done_callback(finish)
    return whole
