"""The gangs of a graph that are trained: the one whose weights go out, and those that are trained beside it.

A learner takes samples with one operator and steps its optimizer with another, both on every rank. The graph orders
the steps: a critic's feeds the actor's, so that a step of the job is over only when all of its learners have stepped.

This module must not know of vertices or calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.errors import GyreError
from gyre.graph.model import Dcg, Dispatch, EdgeKind, Operator


@dataclass(frozen=True, slots=True)
class Learner:
    """`taker` takes samples, `pace` steps the optimizer after `micro_batches` firings of it."""

    taker: Operator
    pace: Operator
    micro_batches: int
    begins_with_policy: bool = False
    """Its ranks are given the policy that training began with, before their first step."""

    @property
    def role(self) -> str:
        return self.pace.role


def learners_of(dcg: Dcg) -> tuple[Learner, tuple[Learner, ...]]:
    """The learner that weights flow out of, and the others. Raises GyreError where there is not exactly one."""
    found = [
        Learner(taker, pace, edge.consume, _begins_with_policy(dcg, pace.role))
        for pace in dcg.operators
        for edge in dcg.into(pace.ref)
        if pace.dispatch is Dispatch.GANG
        and (taker := dcg.operator(edge.source)).dispatch is Dispatch.GANG
        and taker.role == pace.role
        and any(given.kind is EdgeKind.SAMPLES for given in dcg.into(taker.ref))
    ]
    leading = [one for one in found if any(e.kind is EdgeKind.WEIGHTS for e in dcg.out_of(one.pace.ref))]
    if len(leading) != 1:
        raise GyreError(
            f"the graph has {len(leading)} gang operators that take samples and have weights going out; the built-in "
            "trainer needs one.",
            hint="Write a trainer with a fit() for other shapes.",
        )
    return leading[0], tuple(one for one in found if one is not leading[0])


def _begins_with_policy(dcg: Dcg, role: str) -> bool:
    return any(operator.initial_policy for operator in dcg.operators if operator.role == role)
