"""Rows as rollouts: a sample for each rollout, of the tokens that were drawn for it, and the way back.

Whatever asks for a mean over rollouts or over drawn tokens asks it of these. A group whose samples are rollouts of
drawn tokens alone is itself, and its values are its own: nothing is copied.

This module must not know what the values are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.samples import Group, Sample, VersionRun, version_run


def as_drawn(group: Group) -> Group:
    """The group with one sample a rollout: the drawn tokens of its rows, one row's after the other's, as if they were
    one trajectory. What extras have for each token is joined alike; the rest is the last row's, as are reward and
    finish reason. Who generated the tokens is left out."""
    if not any(sample.is_row for sample in group.samples):
        return group
    return replace(group, samples=[_joined([group.samples[at] for at in rows]) for rows in group.rollouts])


def on_rows(group: Group, values: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """For each sample of the group float32 `[t]`, of `values` which has for each sample of `as_drawn(group)` one for
    each token: 0 where a token was not drawn."""
    if not any(sample.is_row for sample in group.samples):
        return list(values)
    found: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(group.samples)
    for rows, joined in zip(group.rollouts, values, strict=True):
        start = 0
        for at in rows:
            end = start + group.samples[at].drawn
            found[at] = at_drawn(group.samples[at], joined[start:end])
            start = end
    return found


def at_drawn(sample: Sample, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 `[t]` of one value for each token that was drawn: 0 where a token was not."""
    if sample.mask is None:
        return values
    found = np.zeros(len(sample.token_ids), values.dtype)
    found[sample.mask] = values
    return found


def of_drawn(sample: Sample, values: NDArray[Any]) -> NDArray[Any]:
    """Of values `[t]` those of the tokens that were drawn."""
    return values if sample.mask is None else values[sample.mask]


def _joined(rows: Sequence[Sample]) -> Sample:
    last = rows[-1]
    if len(rows) == 1 and last.mask is None:
        return replace(last, rollout=None)
    extras = {}
    for key, value in last.extras.items():
        if not all(_is_of_tokens(row, key) for row in rows):
            extras[key] = value
        else:
            extras[key] = np.concatenate([of_drawn(row, row.extras[key]) for row in rows])
    return Sample(
        np.concatenate([of_drawn(row, row.token_ids) for row in rows]),
        np.concatenate([of_drawn(row, row.logprobs) for row in rows]),
        _runs(rows),
        last.finish_reason,
        last.reward,
        extras,
    )


def _is_of_tokens(row: Sample, key: str) -> bool:
    value = row.extras.get(key)
    return isinstance(value, np.ndarray) and value.shape == row.token_ids.shape


def _runs(rows: Sequence[Sample]) -> tuple[VersionRun, ...]:
    """The version runs of the rows' drawn tokens, one row's after the other's."""
    runs: list[VersionRun] = []
    end = 0
    for row in rows:
        for run in row.versions:
            mask = row.mask
            count = run.end - run.start if mask is None else int(np.count_nonzero(mask[run.start : run.end]))
            if count:
                runs.append(version_run(run.version, end, end + count))
                end += count
    return tuple(runs)
