"""Firings that all ranks of a gang run together, each with its share of the groups: a critic's values.

This module must not know which firings are enabled, or what is wrong with a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.errors import VertexDied
from gyre.graph.elements import Operator
from gyre.graph.flow import Firing, Flow
from gyre.workloads.gang.gang import Outcome
from gyre.workloads.gang.spread import SpreadCall, SpreadCalls
from gyre.workloads.trainer.firings.result_checks import NOTHING_KNOWN, Expectations
from gyre.workloads.trainer.firings.results import FiringResults
from gyre.workloads.trainer.firings.vertex_firings import ids_of, in_calls
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.inbox_messages import Inbox, SpreadCallEnded
from gyre.workloads.trainer.learning.lifecycle import GangLifecycle


class SpreadFirings:
    def __init__(
        self,
        flow: Flow,
        groups: GroupState,
        gangs: GangLifecycle,
        results: FiringResults,
        *,
        groups_per_call: int,
        inbox: Inbox,
        expectations: Expectations = NOTHING_KNOWN,
    ) -> None:
        self._flow = flow
        self._groups = groups
        self._gangs = gangs
        self._results = results
        self._groups_per_call = groups_per_call
        self._inbox = inbox
        self._calls = SpreadCalls(self)
        self._expectations = expectations

    def send(self, operator: Operator, firings: Sequence[Firing], step: int) -> None:
        """Send as many of the firings as the gang has room for, if the gang is there."""
        gang = self._gangs.gang_of(operator.role)
        for some in in_calls(firings, self._groups_per_call):
            if gang is None or not self._calls.has_room(operator.role):
                return
            ids = ids_of(some, self._groups)
            shares = [
                [self._groups[group_id] for group_id in share] for share in self._groups.dealt(ids, gang.size)
            ]
            for firing in some:
                self._flow.start(firing)
            expected = self._expectations.for_groups(operator)
            self._calls.send(gang, operator, some, ids, shares, step=step, expected=expected)

    def rank_answered(self, call: SpreadCall, rank: int, outcome: Outcome | VertexDied) -> None:
        """On the transport's thread."""
        self._inbox.put(SpreadCallEnded(call, rank, outcome))

    def is_current(self, call: SpreadCall) -> bool:
        """Whether the call is still waited for, rather than one to a gang that was lost."""
        return self._calls.is_current(call)

    def rank_ended(self, call: SpreadCall) -> None:
        """Handle the call if every rank has ended it: accept its result, or repeat its firings. Raises GangLost and
        Fenced."""
        groups = self._calls.results_of(call)
        if groups is None:
            return
        failure = self._results.problem_with(call.firings, call.ids, groups)
        if failure is not None:
            self._results.fail(call.firings, call.gang.members[0], failure)
        else:
            self._results.accept(call.firings, groups)

    def check_failed(self, now: float) -> None:
        """Raises GangLost for a call that one rank failed and others do not leave."""
        self._calls.check_failed(now)

    def cancel(self) -> None:
        """The gangs are lost: their firings may be sent to the next ones."""
        for firing in self._calls.give_up():
            self._flow.cancel(firing)
