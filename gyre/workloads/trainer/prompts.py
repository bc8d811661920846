"""The prompts of a run, as whoever brings them gives them, and checked: no engine and no learner is to meet a token
that the model does not have.

This module must not know what becomes of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gyre.config.sections import HELD_OUT
from gyre.config.spec import RunSpec
from gyre.errors import UserCodeError
from gyre.rollouts.sample_checks import problem_with_tokens
from gyre.rollouts.samples import Group
from gyre.workloads.trainer.evaluation.held_out import HeldOutSets, numbered


class BringsPrompts(Protocol):
    """The user's trainer."""

    def prompt(self, index: int) -> Group: ...

    def held_out_sets(self, count: int) -> Mapping[str, list[Group]]: ...

    def held_out_at_most(self, count: int) -> int: ...


class CheckedPrompts:
    """`vocabulary` is how many tokens the model has, None where that is unknown."""

    def __init__(self, source: BringsPrompts, run: RunSpec, vocabulary: int | None) -> None:
        self._source = source
        self._run = run
        self._vocabulary = vocabulary

    def prompt(self, group_id: int) -> Group:
        """The prompt of this number. Raises UserCodeError."""
        group = self._source.prompt(group_id)
        self._check(group, f"prompt({group_id})")
        if group.id != group_id:
            raise UserCodeError(
                f"prompt({group_id}) gave a group with the id {group.id}.",
                hint="A group's id is the index that it was asked for by.",
            )
        return group

    def held_out(self) -> HeldOutSets:
        """The held-out sets. Raises UserCodeError."""
        # What the job does not say is what fits; none at all is told by whoever has the prompts.
        count = self._run.held_out or max(self._source.held_out_at_most(self._run.most_held_out), 1)
        sets = self._source.held_out_sets(count)
        if not isinstance(sets, Mapping):
            raise UserCodeError(
                f"held_out_sets({count}) gave {type(sets).__name__}, expected a mapping of names to lists of groups."
            )
        for name, groups in sets.items():
            call = f"held_out({count})" if name == HELD_OUT else f"held_out_sets({count})[{name!r}]"
            if not isinstance(groups, list):
                raise UserCodeError(f"{call} gave {type(groups).__name__}, expected a list of groups.")
            for group in groups:
                self._check(group, call)
        return numbered(sets)

    def _check(self, group: Any, call: str) -> None:
        """Raises UserCodeError, for whoever brings the prompts is the user's."""
        if not isinstance(group, Group):
            raise UserCodeError(f"{call} gave {type(group).__name__}, expected a Group.")
        problem = problem_with_tokens(group.prompt_ids, self._vocabulary)
        if problem:
            raise UserCodeError(f"{call} gave a prompt with {problem}.")
