"""What an operator may return: a method of the user's may return anything, and the trainer must not fall over it.

Each function gives a sentence, or None where the value can be taken. This module must not know of vertices or
calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.rollouts.samples import Group


def problem_with_groups(value: Any, given: Sequence[int], known: Mapping[int, Group]) -> str | None:
    """`given` are the ids that the operator was given; `known` are the groups as they are so far."""
    if not isinstance(value, list) or not all(isinstance(group, Group) for group in value):
        return f"it returned {type(value).__name__}, expected the list of groups that it was given"
    ids = [group.id for group in value]
    if ids != list(given):
        return f"it returned groups {ids}, expected those that it was given: {list(given)}"
    for group in value:
        count = len(known[group.id].samples)
        if count and len(group.samples) != count:
            return f"it returned {len(group.samples)} samples of group {group.id}, which has {count}"
    return None


def problem_with_versions(value: Sequence[Group], oldest: int) -> str | None:
    """Whether any token is of an older policy than that."""
    for group in value:
        if group.versions is not None and group.versions[0] < oldest:
            return f"group {group.id} has tokens of policy version {group.versions[0]}, permitted is {oldest} and newer"
    return None


def problem_with_evaluation(value: Any) -> str | None:
    if isinstance(value, dict) and {"version", "accuracy", "count"} <= value.keys():
        accuracy = value["accuracy"]
        if isinstance(accuracy, int | float) and math.isfinite(accuracy):
            return None
    return f'it returned {value!r:.200}, expected {{"version": …, "accuracy": a number, "count": …}}'
