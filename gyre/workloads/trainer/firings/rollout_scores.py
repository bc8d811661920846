"""What a reward class that looks at each sample by itself is asked of a rollout in rows: the last row, which has how it
ended. All of its rows earn that.

This module must not know who scores, or what for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gyre.rollouts.samples import Group, Sample, unscored, with_score


def scored_rows(group: Group) -> list[int]:
    """Which samples of the group are looked at."""
    return [rows[-1] for rows in group.rollouts]


def for_reward(sample: Sample) -> Sample:
    """What is looked at of a sample: its tokens, and how it ended."""
    return unscored(sample.token_ids, sample.finish_reason, sample.mask, sample.rollout)


def to_score(group: Group) -> Group:
    """The group with what is looked at of it."""
    return replace(group, samples=[for_reward(group.samples[index]) for index in scored_rows(group)])


def with_scores(group: Group, scored: Sequence[Sample]) -> Group:
    """The group with the scores of `scored`, which are those of `scored_rows`, in their order."""
    samples = list(group.samples)
    for rows, its in zip(group.rollouts, scored, strict=True):
        for index in rows:
            samples[index] = with_score(samples[index], its.reward, samples[index].extras | its.extras)
    return replace(group, samples=samples)
