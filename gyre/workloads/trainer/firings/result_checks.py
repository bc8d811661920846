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
from gyre.rollouts.sample_checks import problem_with_rollouts
from gyre.rollouts.samples import Group
from gyre.workloads.plain_data import plain
from gyre.workloads.protocols import Critic, Reference, Reward
from gyre.workloads.tasks.vocabulary import vocabulary_of
from gyre.workloads.vertex.returns import EVALUATE, Expected

SCORING = Operator("reward", Reward.score.__name__)
"""The operator that gives samples their rewards."""
SCORE = SCORING.ref

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        Operator("reference", Reference.logprobs.__name__).ref: ("ref_logprobs",),
        Operator("critic", Critic.values.__name__).ref: ("values",),
    }
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

    def for_evaluation(self, *, newest: int | None = None) -> Expected:
        """Of an operator that answers held-out prompts."""
        return Expected(EVALUATE, vocabulary=self.vocabulary, newest=newest)


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
        unequal = problem_with_rollouts(group.samples) if operator == SCORE else ""
        if unequal:
            return f"it returned group {group.id} with {unequal}"
    return None


def problem_with_versions(value: Sequence[Group], oldest: int) -> str | None:
    """Whether any token is of a policy version older than `oldest`."""
    for group in value:
        if group.versions is not None and group.versions[0] < oldest:
            return f"group {group.id} has tokens of policy version {group.versions[0]}, permitted is {oldest} and newer"
    return None


def problem_with_answers(
    operator: str, value: Sequence[Any], prompts: Sequence[Group], *, to_be_scored: bool
) -> str | None:
    """Of the groups that a rollout class answered held-out prompts with: all by one policy version, and with rewards
    unless they are `to_be_scored`."""
    problem = problem_with_groups(
        operator, value, [prompt.id for prompt in prompts], {prompt.id: prompt for prompt in prompts}
    )
    if problem is not None:
        return problem
    for group in value:
        if not group.samples:
            return f"it returned group {group.id} without samples"
        if not to_be_scored and any(sample.reward is None for sample in group.samples):
            return f"it returned group {group.id} without rewards, and the job has no reward role that scores them"
    found = {version for group in value for version in group.versions or ()}
    if len(found) != 1:
        return f"its tokens are of the policy versions {sorted(found)}, expected those of one"
    return None


def problem_with_evaluation(value: Any) -> str | None:
    """Numbers may be numpy's or torch's: `plain` makes Python's of them."""
    if isinstance(value, dict) and {"version", "accuracy", "count"} <= value.keys():
        row = plain(
            {key: value.get(key) for key in ("version", "count", "accuracy", "reward_mean", "reward_std")}
        )
        whole = _is_whole(row["version"]) and _is_whole(row["count"])
        numbers = (row["accuracy"], row["reward_mean"], row["reward_std"])
        # A NaN is a text by now.
        if whole and all(number is None or isinstance(number, int | float) for number in numbers):
            return None
    return (
        f"it returned {value!r:.200}, expected the groups with samples, or "
        '{"version": …, "accuracy": a number or None, "count": …}'
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
