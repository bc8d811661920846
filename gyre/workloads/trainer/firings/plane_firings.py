"""Firings that the rollout plane runs: groups are requested of it and delivered by it, in any order.

Requests carry no weights: the plane has what was published, and a request says how old a policy may answer it. Training
samples that nobody can generate are quarantined, and another prompt is requested in their place.

This module must not know which firings are enabled, or how the plane generates.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.errors import GyreError
from gyre.graph.elements import Operator
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.sample_checks import problem_with_group
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.plane_client import CannotGenerate
from gyre.workloads.trainer.evaluation.evaluations import Evaluations
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey
from gyre.workloads.trainer.firings.results import FiringResults
from gyre.workloads.trainer.firings.vertex_firings import ids_of
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.groups.replacements import Replacements
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.rollout_requests import RolloutRequests, evaluation_in


class PlaneFirings:
    def __init__(
        self,
        graph: JobGraph,
        flow: Flow,
        groups: GroupState,
        plane: RolloutRequests,
        policies: ServedPolicies,
        results: FiringResults,
        evaluations: Evaluations,
        replacements: Replacements,
        *,
        arrival: ArrivalOrder | None,
        max_staleness: int,
        vocabulary: int | None = None,
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._groups = groups
        self._plane = plane
        self._policies = policies
        self._results = results
        self._evaluations = evaluations
        self._replacements = replacements
        self._arrival = arrival
        self._max_staleness = max_staleness
        self._vocabulary = vocabulary

    # -- requesting ---------------------------------------------------------------------------------

    def send(self, operator: Operator, firings: Sequence[Firing], step: int) -> None:
        """Request the groups of these firings, all of the same step, if any policy is published."""
        published = self._policies.published
        if published is None:
            return
        if not firings[0].groups:
            for firing in firings:
                self._evaluations.request(firing, min(self._graph.version_of(firing), published.version))
            return
        for firing in firings:
            self._flow.start(firing)
        by_version: dict[int, list[tuple[Firing, list[Group]]]] = {}
        for firing in firings:
            groups = [self._groups[group_id] for group_id in ids_of([firing], self._groups)]
            version = self._min_version(groups[0].id, step, published.version)
            by_version.setdefault(version, []).append((firing, groups))
        for version, requested in by_version.items():
            self._record_requested([group.id for _, groups in requested for group in groups], version)
            self._plane.request(requested, min_version=version)

    def _min_version(self, group_id: int, step: int, published: int) -> int:
        """The oldest policy that may answer: in order the staleness bound gives it, otherwise it is the policy that was
        newest when the group was first requested."""
        if self._graph.in_order:
            return max(0, step - 1 - self._max_staleness)
        return self._groups.min_versions.get(group_id, published)

    def _record_requested(self, ids: Sequence[int], version: int) -> None:
        """Out of order, a group's deadline follows from the policy that it was requested of, for a later trainer
        too."""
        if self._arrival is None:
            return
        new = [group_id for group_id in ids if group_id not in self._groups.min_versions]
        if new:
            self._groups.record_requested(new, version)
        for group_id in ids:
            self._arrival.requested(group_id, version)

    # -- deliveries ----------------------------------------------------------------------------------

    def delivered(self, purpose: str, groups: Sequence[Group]) -> None:
        """Groups were delivered: complete the firings that have all of theirs now. A group that nobody can train on,
        which the plane may have from an earlier run, is given up like one that nobody can generate."""
        evaluation = evaluation_in(purpose)
        groups = self._fit(purpose, evaluation, groups)
        completed, unrequested = self._plane.delivered(purpose, groups)
        if evaluation is not None:
            if unrequested:
                self._evaluations.redelivered(evaluation, unrequested)
        else:
            known = [group_id for group_id in unrequested if self._groups.is_settled(group_id)]
            if known:
                self._plane.acknowledge(known)
        for firing, delivered in completed:
            if firing.index not in self._flow.running(firing.operator):
                continue
            if evaluation is None:
                self._results.accept([firing], delivered)
            else:
                self._evaluations.generated(evaluation, firing, delivered)

    def _fit(self, purpose: str, evaluation: EvaluationKey | None, groups: Sequence[Group]) -> list[Group]:
        """Those without a problem; the others are given up."""
        fit = []
        for group in groups:
            problem = problem_with_group(group, vocabulary=self._vocabulary)
            if not problem:
                fit.append(group)
            elif self._plane.is_open(purpose, group.id):
                self._give_up(evaluation, purpose, group.id, f"{problem}.", delivered=group)
                if self._replacements.too_many_quarantined:
                    raise GyreError(f"the rollout plane delivers groups that cannot be trained: {problem}.")
        return fit

    def _give_up(
        self,
        evaluation: EvaluationKey | None,
        purpose: str,
        group_id: int,
        evidence: str,
        *,
        delivered: Group | None = None,
    ) -> None:
        if evaluation is None:
            self._quarantine(group_id, evidence, delivered)
        else:
            self._evaluate_without(evaluation, purpose, group_id, evidence)

    def failed(self, error: GyreError) -> None:
        """Some groups cannot be generated by anybody. Raises `error` where it is about anything else, or where there
        are so many that it is not the prompts' fault."""
        if not isinstance(error, CannotGenerate):
            raise error
        purpose, evidence = error.details["purpose"], str(error)
        evaluation = evaluation_in(purpose)
        for group_id in error.details["ids"]:
            if not self._plane.is_open(purpose, group_id):
                continue  # reported before
            self._give_up(evaluation, purpose, group_id, evidence)
        if self._replacements.too_many_quarantined:
            raise error

    def _quarantine(self, group_id: int, evidence: str, delivered: Group | None) -> None:
        by = self._replacements.quarantine(group_id, evidence=evidence, delivered=delivered)
        published = self._policies.published
        step = self._groups.slot_of(by.id) // self._graph.per_step + 1
        version = self._min_version(by.id, step, published.version if published is not None else 0)
        self._record_requested([by.id], version)
        self._plane.request_instead(group_id, by, min_version=version)

    def _evaluate_without(
        self, evaluation: EvaluationKey, purpose: str, group_id: int, evidence: str
    ) -> None:
        answered = self._plane.leave_out(purpose, group_id)
        if answered is None:
            return
        firing, groups = answered
        if groups:
            self._evaluations.generated(evaluation, firing, groups)
        else:
            self._evaluations.not_generated(evaluation, firing, evidence)
