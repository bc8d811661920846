"""A job's graph as the trainer reads it: who learns, which firings a group passes, and what a firing is for.

This module must not know of vertices, calls, the ledger or time.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from gyre.config import JobSpec
from gyre.errors import GyreError
from gyre.graph import compile_job
from gyre.graph.elements import Dcg, Dispatch, EdgeKind, Operator
from gyre.graph.flow import Firing, Flow
from gyre.workloads.protocols import scores_each_sample
from gyre.workloads.trainer.firings.result_checks import SCORE

_MODELS = ("gyre.workloads.torch", "gyre.workloads.megatron", "gyre.workloads.fsdp")
"""The modules of Gyre's reward models. They get whole groups, and to import them only to learn that takes seconds."""

_MAKES_GROUPS = (Dispatch.ONE, Dispatch.SPREAD, Dispatch.PLANE)


class JobGraph:
    def __init__(self, spec: JobSpec) -> None:
        """Raises GyreError where the graph has no learner whose weights go out, or several."""
        self.dcg = dcg = compile_job(spec).dcg
        self.operators = {operator.ref: operator for operator in dcg.operators}
        self.leader, self.auxiliary = learners_of(dcg)
        self.accumulate_op, self.apply_op = self.leader.accumulate_op, self.leader.apply_op
        self.steps = spec.run.steps
        self.per_step = spec.run.prompts_per_step
        self.in_order = spec.staleness.policy == "in_order"
        """Whether a step trains the groups in its own slots, rather than those that are scored first."""
        self.uses_plane = any(operator.dispatch is Dispatch.PLANE for operator in dcg.operators)
        self.keeps_initial_policy = any(operator.initial_policy for operator in dcg.operators)
        self.weights_in_calls = any(
            self.takes_weights(operator) and operator.dispatch in (Dispatch.ONE, Dispatch.SPREAD)
            for operator in dcg.operators
        )
        """Whether an operator gets the newest weights with its calls."""
        self._scoring_edges = [e for e in dcg.into(self.accumulate_op.ref) if e.kind is EdgeKind.SAMPLES]
        self.refs_before_training = [
            operator.ref
            for operator in dcg.operators
            if operator.dispatch in _MAKES_GROUPS
            and any(edge.kind is EdgeKind.SAMPLES for edge in dcg.into(operator.ref))
        ]
        """The operators that a group passes between being drawn and being scored."""

    def flow(self) -> Flow:
        return Flow(self.dcg, pace=self.apply_op.ref, count=self.steps)

    # -- operators ----------------------------------------------------------------------------------

    def takes_weights(self, operator: Operator) -> bool:
        return any(edge.kind is EdgeKind.WEIGHTS for edge in self.dcg.into(operator.ref))

    def scores_each_sample(self, spec: JobSpec) -> bool:
        """Whether the class of the reward scores each sample by itself (`gyre.workloads.protocols.Reward`). Of a class
        that cannot be imported here, or stands in a script, that is not known, and it gets whole groups."""
        operator = self.operators.get(SCORE)
        entrypoint = spec.roles[operator.role].entrypoint if operator is not None else None
        if entrypoint is None or entrypoint.file is not None or entrypoint.module.startswith(_MODELS):
            return False
        try:
            cls = getattr(importlib.import_module(entrypoint.module), entrypoint.name)
        except Exception:  # a module of the user's may raise anything; the vertex tells what is wrong with it
            return False
        return isinstance(cls, type) and scores_each_sample(cls)

    def ends_scoring(self, ref: str) -> bool:
        """Whether the operator's results go to the training: what it returns may complete a group."""
        return any(edge.source == ref for edge in self._scoring_edges)

    @property
    def evaluations(self) -> list[Operator]:
        """The operators that take no groups: they evaluate a policy version."""
        return [operator for operator in self.dcg.operators if self.is_evaluation(operator)]

    def is_evaluation(self, operator: Operator) -> bool:
        return operator.dispatch is not Dispatch.GANG and not self._has_samples(operator)

    def _has_samples(self, operator: Operator) -> bool:
        edges = (*self.dcg.into(operator.ref), *self.dcg.out_of(operator.ref))
        return any(edge.kind is EdgeKind.SAMPLES for edge in edges)

    # -- firings ------------------------------------------------------------------------------------

    def step_of(self, firing: Firing, last_step: int) -> int:
        """The step that the firing's groups are for; `last_step` where it has none."""
        if not firing.groups:
            return last_step
        return firing.groups[0] // self.per_step + 1 if self.in_order else last_step + 1

    def version_of(self, evaluation: Firing) -> int:
        """The policy version that the evaluation is of: the one whose making enabled it."""
        edge = self.dcg.into(evaluation.operator)[0]
        tokens = (evaluation.index + 1) * edge.consume - edge.initial_tokens
        return max(0, -(-tokens // edge.produce))

    def urgency(self, firing: Firing) -> tuple[int, int]:
        """The order in which enabled firings start: evaluations first, since they must see their own version; then in
        the order of the groups."""
        is_evaluation = not firing.groups and firing.operator != self.apply_op.ref
        return (0 if is_evaluation else 1, firing.index)

    def is_scored(self, flow: Flow, slot: int) -> bool:
        """Whether every operator before the training has done its part for the group in this slot."""
        return all(flow.is_done(edge.source, slot // edge.produce) for edge in self._scoring_edges)

    def mark_scored(self, flow: Flow, drawn: int, unscored_slots: Sequence[int]) -> None:
        """Mark the firings whose groups the ledger has: those of the first `drawn` slots but the unscored ones."""
        evaluations = self.evaluations
        for operator in self.dcg.operators:
            if operator.dispatch is Dispatch.GANG or operator in evaluations:
                continue
            size = len(flow.firing(operator.ref, 0).groups)
            open_firings = {slot // size for slot in unscored_slots}
            done = (index for index in range(drawn // size) if index not in open_firings)
            flow.mark_done(operator.ref, done)


@dataclass(frozen=True, slots=True)
class TrainedGang:
    """A gang that is trained: `apply_op` steps the optimizer after `micro_batches` firings of `accumulate_op`, which
    takes the samples, both on every rank. The graph orders the steps: a critic's step feeds the actor's, so a step of
    the job ends when every learner has stepped."""

    accumulate_op: Operator
    apply_op: Operator
    micro_batches: int
    begins_with_policy: bool = False
    """Whether its ranks are given the policy that training began with, before their first step."""

    @property
    def role(self) -> str:
        return self.apply_op.role


def learners_of(dcg: Dcg) -> tuple[TrainedGang, tuple[TrainedGang, ...]]:
    """The leader, which weights flow out of, and the auxiliary learners. Raises GyreError where there is not exactly
    one leader."""
    found = [
        TrainedGang(accumulate, apply, edge.consume, _begins_with_policy(dcg, apply.role))
        for apply in dcg.operators
        for edge in dcg.into(apply.ref)
        if apply.dispatch is Dispatch.GANG
        and (accumulate := dcg.operator(edge.source)).dispatch is Dispatch.GANG
        and accumulate.role == apply.role
        and any(given.kind is EdgeKind.SAMPLES for given in dcg.into(accumulate.ref))
    ]
    leading = [one for one in found if any(e.kind is EdgeKind.WEIGHTS for e in dcg.out_of(one.apply_op.ref))]
    if len(leading) != 1:
        raise GyreError(
            f"the graph has {len(leading)} gang operators that take samples and have weights going out; the built-in "
            "trainer needs one.",
            hint="Write a trainer with a fit() for other shapes.",
        )
    return leading[0], tuple(one for one in found if one is not leading[0])


def _begins_with_policy(dcg: Dcg, role: str) -> bool:
    return any(operator.initial_policy for operator in dcg.operators if operator.role == role)
