"""The evaluations of a run, from the firing that asks for them to the events that report their results.

Each firing has a part for each held-out set. The rollout plane, or a rollout class, generates the answers; the reward
role scores them (`gyre.workloads.trainer.evaluation.scoring`), and `results` computes the row. A rollout class may also
evaluate by itself, and return what it found.

Invariant *every evaluation is reported*: each held-out set gets, of each version that is due, a result or a reason why
it has none.

This module must not know how an answer is generated.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from gyre.config.sections import EvaluationSettings
from gyre.errors import Fenced, VertexDied
from gyre.graph.elements import Dispatch
from gyre.graph.flow import Firing, Flow
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome, operator_failed
from gyre.workloads.owner import HearsEvents
from gyre.workloads.plain_data import plain
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey, FiringPart, HeldOutSets
from gyre.workloads.trainer.evaluation.log import EvaluationLog
from gyre.workloads.trainer.evaluation.results import right_from, row_of, row_of_own
from gyre.workloads.trainer.evaluation.rollout_calls import EvaluationCall, RolloutCalls
from gyre.workloads.trainer.evaluation.scoring import EvaluationScoring, Generated, PartScoringCall
from gyre.workloads.trainer.firings.result_checks import (
    NOTHING_KNOWN,
    SCORE,
    Expectations,
    problem_with_answers,
    problem_with_evaluation,
    problem_with_groups,
)
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.inbox_messages import Inbox
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.prompts import CheckedPrompts
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

REPORTED_AGAIN = 2
"""Newest versions whose results a later trainer reports again: the master may have missed the last."""
REASON_LENGTH = 1000
"""Characters of a reason that the log and the event keep."""

NO_PROMPTS = "the set has no prompts"


class Evaluations:
    def __init__(
        self,
        graph: JobGraph,
        flow: Flow,
        groups: GroupState,
        calls: VertexCalls,
        policies: ServedPolicies,
        retries: Retries,
        log: EvaluationLog,
        settings: EvaluationSettings,
        *,
        groups_per_call: int,
        scores_each_sample: bool,
        prompts: CheckedPrompts,
        expectations: Expectations = NOTHING_KNOWN,
        plane: RolloutRequests | None,
        samples: SampleWriter,
        reports: HearsEvents,
        inbox: Inbox,
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._groups = groups
        self._calls = calls
        self._retries = retries
        self._log = log
        self._settings = settings
        self._prompts = prompts
        self._plane = plane
        self._samples = samples
        self._reports = reports
        self._rollouts = RolloutCalls(graph, calls, policies, retries, expectations=expectations, inbox=inbox)
        self._scoring = EvaluationScoring(
            calls, retries, groups_per_call=groups_per_call, each_sample=scores_each_sample, inbox=inbox
        )
        self._sets: HeldOutSets = {}
        self._open: dict[Firing, set[str]] = {}
        """The sets of a firing that have no result yet."""

    def report_earlier(self) -> None:
        """Report the last results of earlier trainers again, as `OptimizerSteps.report_earlier` does with steps."""
        rows = [row for row in self.rows if "prompts" in row]  # older lines tell the master nothing
        newest = sorted({row["version"] for row in rows})[-REPORTED_AGAIN:]
        for row in rows:
            if row["version"] in newest:
                self._reports.report("Evaluated", **row)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results so far, in the order in which they arrived."""
        return self._log.rows

    @property
    def first_set(self) -> str | None:
        """The set whose results stand for all where there is room for one; None before any is known."""
        names = self._sets or [row["set"] for row in self.rows if "set" in row]
        return next(iter(names), None)

    @property
    def has_calls(self) -> bool:
        """Whether a vertex is called for an evaluation."""
        return self._rollouts.has_calls or self._scoring.has_calls

    def resume(self) -> None:
        """Read the held-out sets, and mark the firings that earlier trainers settled. An evaluation that was open when
        the last trainer died is made again: by the rollout plane with its own policy, since the plane serves no newer
        one before it is generated; by a rollout class with the newest policy, since the older ones are gone with the
        trainer. In that case one evaluation stands for all that were open."""
        if self._graph.evaluations:
            self._sets = self._prompts.held_out()
        for operator in self._graph.evaluations:
            versions = {
                index: self._graph.version_of(Firing(operator.ref, index))
                for index in range(self._flow.total(operator.ref))
            }
            due = [index for index, version in versions.items() if version <= self._groups.step]
            unsettled = [index for index in due if self._unsettled(versions[index])]
            if operator.dispatch is not Dispatch.PLANE:
                for index in unsettled[:-1]:
                    for name in self._unsettled(versions[index]):
                        reason = "the trainer was replaced, and its policy is served no more"
                        self._leave_out(EvaluationKey(versions[index], name), reason)
                unsettled = unsettled[-1:]
            self._flow.mark_done(operator.ref, (index for index in due if index not in unsettled))

    def _unsettled(self, version: int) -> list[str]:
        return [name for name in self._sets if not self._log.is_settled(EvaluationKey(version, name))]

    # -- starting -----------------------------------------------------------------------------------

    def request(self, firing: Firing, version: int) -> None:
        """Request the answers of this version to every set that has no result of it, of the rollout plane."""
        assert self._plane is not None  # only its operators' firings come here
        for part, evaluation in self._begin(firing, version):
            self._plane.request_evaluation(
                firing, self._sets[part.set], evaluation=evaluation, settings=self._settings
            )

    def call(self, firing: Firing) -> None:
        """Call a rollout class for every set that has no result of the firing's version."""
        for part, _ in self._begin(firing, self._graph.version_of(firing)):
            self._rollouts.add(part, self._sets[part.set])
        self.send(time.monotonic())

    def _begin(self, firing: Firing, version: int) -> list[tuple[FiringPart, EvaluationKey]]:
        """Start a firing. Returns the parts of it that are to be made."""
        self._flow.start(firing)
        names = self._unsettled(version)
        self._open[firing] = set(names)
        for name in [name for name in names if not self._sets[name]]:
            self._leave_out(EvaluationKey(version, name), NO_PROMPTS)
            self._open[firing].discard(name)
        made = [
            (FiringPart(firing, name), EvaluationKey(version, name)) for name in names if self._sets[name]
        ]
        if not made:
            self._complete(firing)
        return made

    def send(self, now: float) -> None:
        """Send what is to be generated to the rollout role, and what is generated to the reward role, as far as they
        have room."""
        self._rollouts.send(step=self._groups.step, now=now)
        self._scoring.send(step=self._groups.step, now=now)

    # -- answers ------------------------------------------------------------------------------------

    def called(self, call: EvaluationCall, outcome: Outcome | VertexDied) -> None:
        """Handle a rollout class's call that has ended. It has evaluated the policy that it holds, which may be newer
        than the one that was due. Raises Fenced."""
        part, member = call.part, call.member
        self._calls.ended(member)
        if isinstance(outcome, VertexDied):
            self._calls.lost(member)
            self._rollouts.lost(part)
            return
        status, value = outcome
        failure = value if status == "error" else self._problem_with_answer(part, value)
        if failure is not None:
            if failure.fenced:
                raise Fenced(failure.error)
            self._calls.failed(member)
            attempt = self._rollouts.failed(part, time.monotonic())
            self._report_failed(member, part.firing.operator, failure, attempt)
            return
        self._rollouts.answered(part)
        prompts = self._sets[part.set]
        if isinstance(value, dict):
            self._settle(part, row_of_own(plain(value), part.set, len(prompts)))
            return
        version = value[0].versions[0]
        if self._log.is_settled(EvaluationKey(version, part.set)):
            self._settle(part, {"version": version, "set": part.set})
        elif SCORE in self._graph.operators:
            self.generated(EvaluationKey(version, part.set), part.firing, value)
        else:
            self._settle_scored(part, EvaluationKey(version, part.set), value)

    def _problem_with_answer(self, part: FiringPart, value: Any) -> Failure | None:
        if isinstance(value, list):
            prompts, is_scored = self._sets[part.set], SCORE in self._graph.operators
            problem = problem_with_answers(part.firing.operator, value, prompts, to_be_scored=is_scored)
        else:
            problem = problem_with_evaluation(value)
        return _failure(part.firing.operator, problem)

    def generated(self, evaluation: EvaluationKey, firing: Firing, groups: list[Group]) -> None:
        """An evaluation is generated; the reward role scores it next."""
        self._scoring.add(FiringPart(firing, evaluation.set), Generated(evaluation, groups))
        self.send(time.monotonic())

    def not_generated(self, evaluation: EvaluationKey, firing: Firing, reason: str) -> None:
        """The rollout plane cannot generate any group of an evaluation."""
        self._leave_out(evaluation, reason)
        self._end(FiringPart(firing, evaluation.set))

    def redelivered(self, evaluation: EvaluationKey, ids: list[int]) -> None:
        """Groups were delivered that no firing waits for. If their evaluation is settled the plane may forget them;
        otherwise they are delivered again when the evaluation is requested again."""
        if self._plane is not None and self._log.is_settled(evaluation):
            self._plane.acknowledge_evaluation(evaluation, ids)

    # -- scoring ------------------------------------------------------------------------------------

    def scored(self, call: PartScoringCall, member: Member, outcome: Outcome | VertexDied) -> None:
        """Handle a scoring that has ended: repeat it, or log the result of a part that is scored."""
        part = call.part
        self._calls.ended(member)
        if isinstance(outcome, VertexDied):
            self._calls.lost(member)
            self._scoring.lost(call)
            return
        status, value = outcome
        failure = value if status == "error" else self._problem_with_scores(call, value)
        if failure is not None:
            attempt = self._scoring.failed(call, time.monotonic())
            self._report_failed(member, SCORE, failure, attempt)
            return
        found = self._scoring.scored(call, value)
        if found is None:
            return
        generated, groups = found
        self._settle_scored(part, generated.evaluation, groups)
        if self._graph.operators[part.firing.operator].dispatch is Dispatch.PLANE and self._plane is not None:
            self._plane.acknowledge_evaluation(generated.evaluation, [group.id for group in generated.groups])

    def _problem_with_scores(self, call: PartScoringCall, value: Any) -> Failure | None:
        generated = {group.id: group for group in self._scoring.groups_of(call)}
        return _failure(SCORE, problem_with_groups(SCORE, value, list(generated), generated))

    def _row(self, evaluation: EvaluationKey, groups: list[Group]) -> dict[str, Any]:
        metas = {prompt.id: prompt.meta for prompt in self._sets[evaluation.set]}
        return row_of(evaluation, groups, [metas[group.id] for group in groups], self._settings)

    def _report_failed(self, member: Member, operator: str, failure: Failure, attempt: int) -> None:
        self._reports.report("OperatorFailed", **operator_failed(member, operator, failure, attempt))

    # -- the log ------------------------------------------------------------------------------------

    def _settle_scored(self, part: FiringPart, evaluation: EvaluationKey, groups: list[Group]) -> None:
        """Settle a part whose answers are scored, and have them kept."""
        row = self._row(evaluation, groups)
        if not self._settle(part, row):
            return
        by_id = {group.id: group for group in groups}
        placed = [
            replace(by_id[prompt.id], id=place)
            for place, prompt in enumerate(self._sets[evaluation.set])
            if prompt.id in by_id
        ]
        self._samples.evaluated(
            evaluation.version,
            evaluation.set,
            placed,
            right_from=right_from(row),
            right_by=row["right_by"],
        )

    def _settle(self, part: FiringPart, row: dict[str, Any]) -> bool:
        """Log the result of a part, and end it. False where its version and set were settled already."""
        added = self._log.add(row)
        if added:
            self._reports.report("Evaluated", **row)
        reason = f"version {row['version']} was served by then, and was evaluated instead"
        self._leave_out(EvaluationKey(self._graph.version_of(part.firing), part.set), reason)
        self._end(part)
        return added

    def _leave_out(self, evaluation: EvaluationKey, reason: str) -> None:
        """There will be no result, unless there is one."""
        if self._log.leave_out(evaluation, reason[:REASON_LENGTH]):
            version, name = evaluation
            self._reports.report(
                "EvaluationLeftOut", version=version, set=name, reason=reason[:REASON_LENGTH]
            )

    def _end(self, part: FiringPart) -> None:
        still_open = self._open.get(part.firing, set())
        still_open.discard(part.set)
        if not still_open:
            self._complete(part.firing)

    def _complete(self, firing: Firing) -> None:
        self._open.pop(firing, None)
        self._flow.complete(firing)


def _failure(operator: str, problem: str | None) -> Failure | None:
    return None if problem is None else Failure(error=f"{operator}: {problem}.", traceback="", user_code=True)
