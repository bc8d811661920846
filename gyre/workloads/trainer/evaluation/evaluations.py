"""The evaluations of a run, from the firing that asks for one to the event that reports its result.

A rollout class evaluates a policy by itself. The rollout plane only generates: the reward role then scores what it
generated (`gyre.workloads.trainer.evaluation.scoring`).

Invariant *every evaluation is reported*: each version that is due an evaluation gets a result, or a reason why it has
none.

This module must not know how an evaluation is generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gyre.errors import VertexLost
from gyre.graph.elements import Dispatch
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome
from gyre.workloads.plain_data import plain
from gyre.workloads.trainer.evaluation.log import EvaluationLog
from gyre.workloads.trainer.evaluation.scoring import EvaluationScoring
from gyre.workloads.trainer.firings.result_checks import SCORE, problem_with_groups
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

REASON_LENGTH = 1000
"""Characters of a reason that the log and the event keep."""


class Evaluations:
    """`report` sends an event to the journal, `report_failure(member, operator, failure, attempt)` reports a failed
    call; `on_scored(version, member, outcome)` is called on the transport's thread."""

    def __init__(
        self,
        graph: JobGraph,
        flow: Flow,
        groups: GroupState,
        calls: VertexCalls,
        retries: Retries,
        log: EvaluationLog,
        *,
        plane: RolloutRequests | None,
        report: Callable[..., None],
        report_failure: Callable[[Member, str, Failure, int], None],
        on_scored: Callable[[int, Member, Outcome | VertexLost], None],
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._groups = groups
        self._calls = calls
        self._retries = retries
        self._log = log
        self._plane = plane
        self._report = report
        self._report_failure = report_failure
        self._scoring = EvaluationScoring(calls, retries, on_result=on_scored)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results so far, in the order in which they arrived."""
        return self._log.rows

    def resume(self) -> None:
        """Mark the firings that earlier trainers settled. An evaluation that was open when the last trainer died is
        made again: by the rollout plane with its own policy, since the plane serves no newer one before it is
        generated; by a rollout class with the newest policy, since the older ones are gone with the trainer. In that
        case one evaluation stands for all that were open."""
        for operator in self._graph.evaluations:
            versions = {
                index: self._graph.version_of(Firing(operator.ref, index))
                for index in range(self._flow.total(operator.ref))
            }
            due = [index for index, version in versions.items() if version <= self._groups.step]
            unsettled = [index for index in due if not self._log.is_settled(versions[index])]
            if operator.dispatch is not Dispatch.PLANE:
                for index in unsettled[:-1]:
                    self.leave_out(
                        versions[index], "the trainer was replaced, and its policy is served no more"
                    )
                unsettled = unsettled[-1:]
            self._flow.mark_done(operator.ref, (index for index in due if index not in unsettled))

    # -- results ------------------------------------------------------------------------------------

    def evaluated(self, firing: Firing, row: dict[str, Any]) -> None:
        """A rollout class has evaluated the policy that it holds, which may be newer than the one that was due."""
        self._retries.succeeded((firing.operator, firing.index))
        self._add(row)
        reason = f"version {row['version']} was served by then, and was evaluated instead"
        self.leave_out(self._graph.version_of(firing), reason)
        self._flow.complete(firing)

    def generated(self, version: int, firing: Firing, groups: list[Group]) -> None:
        """The rollout plane has generated an evaluation; the reward role scores it next."""
        self._scoring.add(version, firing, groups)
        self.send(time.monotonic())

    def not_generated(self, version: int, firing: Firing, reason: str) -> None:
        """The rollout plane cannot generate any group of an evaluation."""
        self.leave_out(version, reason)
        self._flow.complete(firing)

    def redelivered(self, version: int, ids: list[int]) -> None:
        """Groups were delivered that no firing waits for. If their evaluation is settled the plane may forget them;
        otherwise they are delivered again when the evaluation is requested again."""
        if self._plane is not None and self._log.is_settled(version):
            self._plane.acknowledge_evaluation(version, ids)

    # -- scoring ------------------------------------------------------------------------------------

    def send(self, now: float) -> None:
        """Send generated evaluations to the reward role, as far as it has room."""
        self._scoring.send(step=self._groups.step, now=now)

    def scored(self, version: int, member: Member, outcome: Outcome | VertexLost) -> None:
        """Handle a scoring that has ended: log its result, or score the evaluation again."""
        self._calls.ended(member)
        if isinstance(outcome, VertexLost):
            self._calls.lost(member)
            self._scoring.lost(version)
            return
        status, value = outcome
        failure = value if status == "error" else self._problem_with(version, value)
        if failure is not None:
            attempt = self._scoring.failed(version, time.monotonic())
            self._report_failure(member, SCORE, failure, attempt)
            return
        firing, ids, row = self._scoring.scored(version, value)
        self._add(row)
        if self._plane is not None:
            self._plane.acknowledge_evaluation(version, ids)
        self._flow.complete(firing)

    def _problem_with(self, version: int, value: Any) -> Failure | None:
        generated = {group.id: group for group in self._scoring.groups_of(version)}
        problem = problem_with_groups(SCORE, value, list(generated), generated)
        return (
            None if problem is None else Failure(error=f"{SCORE}: {problem}.", traceback="", user_code=True)
        )

    # -- the log ------------------------------------------------------------------------------------

    def leave_out(self, version: int, reason: str) -> None:
        """The version will have no result, unless it has one."""
        if self._log.leave_out(version, reason[:REASON_LENGTH]):
            self._report("EvaluationLeftOut", version=version, reason=reason[:REASON_LENGTH])

    def _add(self, value: dict[str, Any]) -> None:
        row = plain({"version": value["version"], "accuracy": value["accuracy"], "count": value["count"]})
        if self._log.add(row):
            self._report("Evaluated", **row)
