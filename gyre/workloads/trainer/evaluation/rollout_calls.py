"""Evaluations by a rollout class that the trainer calls: one call for each held-out set, to whichever vertex has room.

The newest policy travels with the call (`gyre.workloads.trainer.firings.vertex_calls`).

This module must not know when an evaluation is due, or what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome, outcome_of
from gyre.workloads.trainer.evaluation.held_out import FiringPart
from gyre.workloads.trainer.firings.result_checks import Expectations
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.inbox_messages import EvaluationAnswered, Inbox
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.membership import Member


@dataclass(frozen=True, slots=True)
class EvaluationCall:
    part: FiringPart
    member: Member


class RolloutCalls:
    def __init__(
        self,
        graph: JobGraph,
        calls: VertexCalls,
        policies: ServedPolicies,
        retries: Retries,
        *,
        expectations: Expectations,
        inbox: Inbox,
    ) -> None:
        self._graph = graph
        self._calls = calls
        self._policies = policies
        self._retries = retries
        self._expectations = expectations
        self._inbox = inbox
        self._open: dict[FiringPart, Sequence[Group]] = {}
        self._sent: set[FiringPart] = set()

    def add(self, part: FiringPart, prompts: Sequence[Group]) -> None:
        self._open[part] = prompts

    @property
    def has_calls(self) -> bool:
        return bool(self._sent)

    def send(self, *, step: int, now: float) -> None:
        """Make the calls of evaluations that have none in flight, as far as vertices have room."""
        for part, prompts in self._open.items():
            if part in self._sent or not self._retries.may(("evaluate", part), now):
                continue
            operator = self._graph.operators[part.firing.operator]
            policy = None
            if self._graph.takes_weights(operator) or operator.initial_policy:
                policy = self._policies.initial if operator.initial_policy else self._policies.published
                if policy is None:
                    continue
            member = self._calls.free_member(operator.role)
            if member is None:
                continue
            expected = self._expectations.for_evaluation(
                newest=policy.version if policy is not None else None
            )
            future = self._calls.fire(
                member,
                operator,
                list(prompts),
                step=step,
                index=part.firing.index,
                expected=expected,
                policy=policy,
            )
            future.add_done_callback(partial(self._call_ended, EvaluationCall(part, member)))
            self._sent.add(part)

    def _call_ended(self, call: EvaluationCall, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._inbox.put(EvaluationAnswered(call, outcome_of(done)))

    def lost(self, part: FiringPart) -> None:
        """The vertex that was called died: another one may be called at once."""
        self._sent.discard(part)

    def failed(self, part: FiringPart, now: float) -> int:
        """The call failed: it may be repeated after a pause. Returns how often in a row it, or its operator, has."""
        self._sent.discard(part)
        operator = self._retries.failed(part.firing.operator, now)
        return max(operator, self._retries.failed(("evaluate", part), now))

    def answered(self, part: FiringPart) -> None:
        """Take an evaluation out: its call has a result."""
        self._sent.discard(part)
        del self._open[part]
        self._retries.succeeded(part.firing.operator)
        self._retries.succeeded(("evaluate", part))
