"""The gangs of a graph that are trained: the leader, whose weights go out, and auxiliary ones such as a critic.

A learner takes samples with its accumulate operator and steps its optimizer with its apply operator, both on every
rank. The graph orders the steps: a critic's step feeds the actor's, so a step of the job ends when every learner has
stepped.

This module must not know of vertices or calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.errors import GyreError
from gyre.graph.elements import Dcg, Dispatch, EdgeKind, Operator


@dataclass(frozen=True, slots=True)
class Learner:
    """`apply_op` steps the optimizer after `micro_batches` firings of `accumulate_op`, which takes the samples."""

    accumulate_op: Operator
    apply_op: Operator
    micro_batches: int
    begins_with_policy: bool = False
    """Whether its ranks are given the policy that training began with, before their first step."""

    @property
    def role(self) -> str:
        return self.apply_op.role


def learners_of(dcg: Dcg) -> tuple[Learner, tuple[Learner, ...]]:
    """The leader, which weights flow out of, and the auxiliary learners. Raises GyreError where there is not exactly
    one leader."""
    found = [
        Learner(accumulate, apply, edge.consume, _begins_with_policy(dcg, apply.role))
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
