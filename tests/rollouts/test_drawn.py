"""Rows as rollouts and back: what was drawn, once, in order; and what is no row is left as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.drawn import as_drawn, at_drawn, of_drawn, on_rows
from gyre.rollouts.sample_checks import problem_with_group
from gyre.rollouts.samples import Group, Sample, VersionRun
from tests.examples import examples
from tests.rollout_rows import sessions


@settings(deadline=None, max_examples=examples(50))
@given(st.integers(0, 2**20), st.randoms(use_true_random=False))
def test_a_rollout_has_the_drawn_tokens_of_its_rows_and_they_find_back(seed: int, random: Any) -> None:
    (group,) = sessions(0, 1, seed=seed)
    random.shuffle(group.samples)  # rows of a rollout need not stand beside each other
    drawn = as_drawn(group)
    assert len(drawn.samples) == len(group.rollouts) == 3
    assert drawn.token_count == group.token_count == drawn.positions <= group.positions
    assert drawn.versions == group.versions
    for rows, whole in zip(group.rollouts, drawn.samples, strict=True):
        of = [group.samples[at] for at in rows]
        assert {one.reward for one in of} == {whole.reward}
        assert not whole.is_row
        wanted = [
            (token, logprob, value, run.version)
            for one in of
            for at, (token, logprob, value) in enumerate(
                zip(one.token_ids, one.logprobs, one.extras["values"], strict=True)
            )
            for run in one.versions
            if one.mask[at] and run.start <= at < run.end
        ]
        versions = [run.version for run in whole.versions for _ in range(run.start, run.end)]
        columns = (whole.token_ids, whole.logprobs, whole.extras["values"], versions)
        assert list(zip(*columns, strict=True)) == wanted
    back = on_rows(group, [sample.logprobs for sample in drawn.samples])
    for sample, found in zip(group.samples, back, strict=True):
        np.testing.assert_array_equal(found, sample.logprobs)  # 0 where nothing was drawn
        np.testing.assert_array_equal(at_drawn(sample, of_drawn(sample, sample.logprobs)), sample.logprobs)


def test_a_group_without_rows_is_itself() -> None:
    sample = Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(0, 0, 2),))
    group = Group(0, np.zeros(1, np.int32), samples=[sample, sample])
    values = [np.ones(2, np.float32), np.zeros(2, np.float32)]
    assert as_drawn(group) is group
    assert all(mine is its for mine, its in zip(on_rows(group, values), values, strict=True))


def test_what_extras_say_of_a_rollout_is_what_its_last_row_says() -> None:
    (group,) = sessions(0, 1)
    rows = [group.samples[at] for at in group.rollouts[0]]
    for number, row in enumerate(rows):
        row.extras |= {"reward.acc": float(number), "lone": np.zeros(3 + number)}
        row.finish_reason = "stop" if number else "length"
    found = as_drawn(group).samples[0]
    assert (found.extras["reward.acc"], found.finish_reason) == (float(len(rows) - 1), "stop")
    assert len(found.extras["lone"]) == 2 + len(rows)


def changed(**changes: Any) -> Group:
    """A group of two rollouts, the second in two rows, whose last row is changed."""
    mask = np.array([False, True])
    first = Sample(np.ones(2, np.int32), np.full(2, -1.0, np.float32), (VersionRun(0, 0, 2),), rollout=0)
    row = replace(first, logprobs=np.array([0.0, -1.0], np.float32), mask=mask, rollout=1, reward=0.5)
    return Group(7, np.ones(1, np.int32), samples=[replace(first, reward=1.0), row, replace(row, **changes)])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"mask": np.array([False, False]), "logprobs": np.zeros(2, np.float32)}, "no token was drawn"),
        ({"mask": np.array([1, 0])}, "expected a bool array of 2 elements"),
        ({"mask": np.ones((2, 2), np.bool_)}, "expected a bool array of 2 elements"),
        ({"mask": [True, True]}, "expected a bool array of 2 elements"),
        ({"mask": np.array([True, False])}, "log-prob of -1 at token 1, which by the mask was not drawn"),
        ({"logprobs": np.array([0.0, np.nan], np.float32)}, "a log-prob of nan"),
        ({"logprobs": np.array([0.0, 0.5], np.float32)}, "a log-prob of 0.5"),
        ({"reward": 0.25}, "samples 1 and 2, rows of rollout 1, with the rewards 0.5 and 0.25"),
        ({"reward": None}, "with the rewards 0.5 and None"),
        ({"rollout": None}, "sample 2 that is a row of rollout None"),
        ({"rollout": -1}, "sample 2 that is a row of rollout -1"),
        ({"rollout": "1"}, "sample 2 that is a row of rollout '1'"),
        ({"rollout": True}, "sample 2 that is a row of rollout True"),
    ],
)
def test_rows_that_cannot_be_are_a_problem_of_the_group(changes: dict[str, Any], problem: str) -> None:
    found = problem_with_group(changed(**changes), vocabulary=9)
    assert problem in found
    assert bool(found) == bool(problem)
    assert "group 7" in found or not problem
