"""What an operator may return: a user's method may return anything, and the trainer must survive it.

What a method returns is checked in its own process, against what the trainer expects (`Expectations`); here the trainer
checks what only it knows, and what came in another way. Each function returns a sentence that says what is wrong, or
None where the value is accepted. This module must not know of vertices or calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gyre.config import JobSpec
from gyre.graph.elements import Operator
from gyre.rollouts.samples import Group
from gyre.workloads.plain_data import plain
from gyre.workloads.tasks.vocabulary import vocabulary_of
from gyre.workloads.vertex.returns import EVALUATE, Expected

SCORE = "reward.score"
"""The operator that gives samples their rewards."""

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"reference.logprobs": ("ref_logprobs",), "critic.values": ("values",)}
)
"""By operator, the extras that Gyre's own learners read."""


@dataclass(frozen=True, slots=True)
class Expectations:
    """What a job's operators must return. `vocabulary` and `samples`, of a group, are None where the job's `config`
    does not say; `own_learner` is whether the samples are trained by a class of Gyre's own, which reads `EXTRAS`."""

    vocabulary: int | None = None
    samples: int | None = None
    own_learner: bool = False

    @classmethod
    def of(cls, spec: JobSpec, learner: str) -> Expectations:
        """`learner` is the role that is trained."""
        sampling = spec.config.get("sampling")
        count = sampling.get("n") if isinstance(sampling, dict) else None
        entrypoint = spec.roles[learner].entrypoint
        return cls(
            vocabulary_of(spec.config),
            count if isinstance(count, int) else None,
            entrypoint is None or entrypoint.module.startswith("gyre.workloads."),
        )

    def for_groups(self, operator: Operator, *, newest: int | None = None) -> Expected:
        """Of an operator that takes groups; `newest` is the newest policy version that its vertices were sent."""
        return Expected(
            operator.method,
            vocabulary=self.vocabulary,
            newest=newest,
            samples=self.samples,
            rewards=operator.ref == SCORE,
            extras=EXTRAS.get(operator.ref, ()) if self.own_learner else (),
        )

    @staticmethod
    def for_evaluation() -> Expected:
        return Expected(EVALUATE)


NOTHING_KNOWN = Expectations()


def problem_with_groups(
    operator: str, value: Any, given: Sequence[int], known: Mapping[int, Group]
) -> str | None:
    """`given` are the ids of the groups that the operator was given; `known` are the groups as they are so far."""
    if not isinstance(value, list) or not all(isinstance(group, Group) for group in value):
        return f"it returned {type(value).__name__}, expected the list of groups that it was given"
    ids = [group.id for group in value]
    if ids != list(given):
        return f"it returned groups {ids}, expected those that it was given: {list(given)}"
    for group in value:
        count = len(known[group.id].samples)
        if count and len(group.samples) != count:
            return f"it returned {len(group.samples)} samples of group {group.id}, which has {count}"
        missing = sum(sample.reward is None for sample in group.samples)
        if operator == SCORE and missing:
            return (
                f"it returned group {group.id} without rewards: set sample.reward "
                f"({missing} of {len(group.samples)} samples have none)"
            )
    return None


def problem_with_versions(value: Sequence[Group], oldest: int) -> str | None:
    """Whether any token is of a policy version older than `oldest`."""
    for group in value:
        if group.versions is not None and group.versions[0] < oldest:
            return f"group {group.id} has tokens of policy version {group.versions[0]}, permitted is {oldest} and newer"
    return None


def problem_with_evaluation(value: Any) -> str | None:
    """Numbers may be numpy's or torch's: `plain` makes Python's of them."""
    if isinstance(value, dict) and {"version", "accuracy", "count"} <= value.keys():
        row = plain({key: value[key] for key in ("version", "accuracy", "count")})
        whole = isinstance(row["version"], int) and isinstance(row["count"], int)
        if whole and isinstance(row["accuracy"], int | float):  # a NaN is a text by now
            return None
    return f'it returned {value!r:.200}, expected {{"version": …, "accuracy": a number, "count": …}}'
