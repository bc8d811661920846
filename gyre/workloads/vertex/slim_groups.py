"""Groups on their way to an operator and back, without what it does not need and what its caller has.

`SlimGroups` are samples to score: prompts, meta, ids of tokens, how each sample ended, and its reward where it has one
already. An operator gets them as groups whose log-probs are NaN and whose policy versions are -1. `Additions` are what
an operator added to the samples that it was given: rewards and extras.

This module must not know which operators there are, or who calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.samples import Group, Sample, unscored, with_score

Extras = list[list[dict[str, Any]]]
"""Of each sample of each group."""


@dataclass(frozen=True, slots=True)
class SlimGroups:
    """`samples` has, for each group, the length of each sample, why it ended, its reward or None, and where it is a
    row, its mask and its rollout; `token_ids`, int32, are those of all samples one after another."""

    prompts: list[tuple[int, NDArray[np.int32], dict[str, Any]]]
    """Id, prompt and meta of each group."""
    samples: list[list[tuple[Any, ...]]]
    token_ids: NDArray[np.int32]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> SlimGroups:
        every = [sample.token_ids for group in groups for sample in group.samples]
        return cls(
            [(group.id, group.prompt_ids, group.meta) for group in groups],
            [[_told(one) for one in group.samples] for group in groups],
            np.concatenate(every) if every else np.zeros(0, np.int32),
        )

    def groups(self) -> list[Group]:
        groups, at = [], 0
        for (group_id, prompt_ids, meta), told in zip(self.prompts, self.samples, strict=True):
            samples = []
            for length, finish, reward, *row in told:
                sample = unscored(self.token_ids[at : at + length], finish, *row)
                sample.reward = reward
                samples.append(sample)
                at += length
            groups.append(Group(group_id, prompt_ids, meta, samples))
        return groups


def _told(sample: Sample) -> tuple[Any, ...]:
    told = len(sample.token_ids), sample.finish_reason, sample.reward
    return (*told, sample.mask, sample.rollout) if sample.is_row else told


@dataclass(frozen=True, slots=True)
class Additions:
    """By group, in order: its id, and for each sample its reward and the extras that it did not have before."""

    rows: list[tuple[int, list[tuple[Any, dict[str, Any]]]]]


def extras_of(given: Any) -> Extras:
    """The extras of the groups that an operator is given, before it may change them."""
    return [[dict(sample.extras) for sample in group.samples] for group in given]


def additions(before: Extras, returned: Any) -> Any:
    """What an operator that returned this added; what is no list of groups stays as it is, for the caller to refuse."""
    if not isinstance(returned, list) or not all(isinstance(group, Group) for group in returned):
        return returned
    rows = []
    for at, group in enumerate(returned):
        had = before[at] if at < len(before) and len(before[at]) == len(group.samples) else []
        known = had or [{}] * len(group.samples)
        samples = [
            (
                sample.reward,
                {
                    key: value
                    for key, value in sample.extras.items()
                    if key not in earlier or earlier[key] is not value
                },
            )
            for sample, earlier in zip(group.samples, known, strict=True)
        ]
        rows.append((group.id, samples))
    return Additions(rows)


def joined(groups: Sequence[Group], answered: Any) -> Any:
    """The groups as an operator would have returned them whole, `groups` being those that it was given. Where it
    returned others they have no prompts and no tokens, and whoever looks at ids and counts refuses them."""
    if not isinstance(answered, Additions):
        return answered
    known = {group.id: group for group in groups}
    return [_joined(known.get(group_id), group_id, samples) for group_id, samples in answered.rows]


def _joined(group: Group | None, group_id: int, added: list[tuple[Any, dict[str, Any]]]) -> Group:
    if group is None or len(group.samples) != len(added):
        nothing = np.zeros(0, np.int32)
        return Group(group_id, nothing, {}, [unscored(nothing, "") for _ in added])
    samples = [
        with_score(one, reward, one.extras | extras)
        for one, (reward, extras) in zip(group.samples, added, strict=True)
    ]
    return Group(group.id, group.prompt_ids, group.meta, samples)
