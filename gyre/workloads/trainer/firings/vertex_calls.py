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
from gyre.workloads.trainer.learning.publishing import Published
from gyre.workloads.vertex.call_info import CallInfo
from gyre.workloads.vertex.membership import Member, Membership
from gyre.workloads.vertex.returns import Expected
from gyre.workloads.vertex.slim_groups import SlimGroups
from gyre.workloads.vertex.transport import Transport

CALLS_PER_VERTEX = 2
"""Calls sent to one vertex at a time: one in work, one waiting, so that it never idles for a round trip."""


class VertexCalls:
    def __init__(self, membership: Membership, transport: Transport) -> None:
        self._membership = membership
        self._transport = transport
        self._in_flight: dict[Member, int] = {}
        self._loaded: dict[Member, tuple[int, str]] = {}

    @property
    def roles_at_work(self) -> set[str]:
        """The roles that have a call, also one that is no firing of the graph."""
        return {vertex.rpartition("-")[0] for (vertex, _), count in self._in_flight.items() if count}

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
        groups: list[Group] | SlimGroups,
        *,
        step: int,
        index: int,
        expected: Expected,
        added_only: bool = False,
        policy: Published | None = None,
    ) -> Future[Outcome]:
        """Have a vertex run an operator of the graph on these groups. The policy is sent along unless the vertex holds
        it. `expected` is what the vertex checks; with `added_only` the result is `Additions`."""
        bundle = None
        if policy is not None and self._loaded.get(member) != policy.identity:
            bundle = policy.bundle
            self._loaded[member] = policy.identity
        self._in_flight[member] = self._in_flight.get(member, 0) + 1
        info = CallInfo(step=step, index=index, expected=expected, added_only=added_only)
        return self._transport.submit(*member, operator.method, (groups,), info=info, bundle=bundle)

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
