"""The held-out sets of a run: prompts by the set's name, each with a number that no other prompt of the job has; and
what an evaluation is of: a policy version and a set. A firing of an evaluating operator has a part for each set.

This module must not know when a set is evaluated, or where its prompts come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gyre.config.sections.data import SET_NAME
from gyre.errors import UserCodeError
from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group


class EvaluationKey(NamedTuple):
    version: int
    set: str


class FiringPart(NamedTuple):
    """The part of a firing that is of one held-out set."""

    firing: Firing
    set: str


HeldOutSets = dict[str, list[Group]]
"""In the order of their names: that in which a job file has them is lost where its spec is kept."""


def numbered(sets: Mapping[str, Sequence[Group]]) -> HeldOutSets:
    """The sets in the order of their names, with the ids -1, -2, … through all of them. Raises UserCodeError for a set
    whose name is none."""
    found: HeldOutSets = {}
    last = 0
    for name in sorted(sets, key=str):
        groups = sets[name]
        if not isinstance(name, str) or not SET_NAME.fullmatch(name):
            raise UserCodeError(
                f"held_out_sets gave a set the name {name!r:.100}.",
                hint="A name is of letters, digits, '_', '-' and '.'.",
            )
        found[name] = [replace(group, id=last - 1 - at) for at, group in enumerate(groups)]
        last -= len(groups)
    return found
