"""What a user's operator returned is taken only where the trainer can go on with it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.trainer.firings.result_checks import (
    problem_with_evaluation,
    problem_with_groups,
    problem_with_versions,
)


def group(group_id, *versions):
    samples = [
        Sample(np.zeros(1, np.int32), np.zeros(1, np.float32), (VersionRun(version, 0, 1),))
        for version in versions
    ]
    return Group(group_id, np.zeros(1, np.int32), samples=samples)


KNOWN = {4: group(4, 0, 0), 5: group(5)}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([group(4, 0, 0), group(5, 0)], None),
        ([group(4, 1, 1), group(5)], None),
        (None, "it returned NoneType, expected the list of groups that it was given"),
        ((group(4, 0, 0), group(5)), "it returned tuple"),
        ([1, 2], "it returned list, expected the list of groups"),
        ([group(4, 0, 0)], r"it returned groups \[4\], expected those that it was given: \[4, 5\]"),
        ([group(5), group(4, 0, 0)], r"it returned groups \[5, 4\]"),
        ([group(4, 0), group(5)], "it returned 1 samples of group 4, which has 2"),
    ],
)
def test_groups_come_back_as_they_were_given(value, problem):
    found = problem_with_groups("rollout.generate", value, (4, 5), KNOWN)
    assert found is None if problem is None else re.match(problem, found or "")


def scored(group_id, *rewards):
    given = group(group_id, *(0 for _ in rewards))
    for sample, reward in zip(given.samples, rewards, strict=True):
        sample.reward = reward
    return given


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([scored(4, 0.0, 1.0), scored(5, 0.5)], None),
        ([scored(4, 0.0, None), scored(5, 0.5)], "it returned group 4 without rewards: .*1 of 2 samples"),
        ([scored(4, 0.0, 1.0), scored(5, None)], "it returned group 5 without rewards: .*1 of 1 samples"),
    ],
)
def test_a_reward_rewards_every_sample(value, problem):
    found = problem_with_groups("reward.score", value, (4, 5), KNOWN)
    assert found is None if problem is None else re.match(problem, found or "")
    assert problem_with_groups("reference.logprobs", value, (4, 5), KNOWN) is None, "others need not"


@pytest.mark.parametrize(
    ("versions", "oldest", "permitted"),
    [
        ((0,), 0, True),
        ((0,), 1, False),
        ((1,), 1, True),
        ((1, 0), 1, False),
        ((2, 3), 2, True),
        ((), 9, True),
    ],
)
def test_no_token_is_older_than_permitted(versions, oldest, permitted):
    problem = problem_with_versions([group(7, *versions)], oldest)
    assert (problem is None) is permitted


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ({"version": 1, "accuracy": 0.5, "count": 3}, True),
        ({"version": 1, "accuracy": 1, "count": 3, "more": "is fine"}, True),
        ({"version": np.int64(1), "accuracy": torch.tensor(0.5), "count": np.int32(3)}, True),
        ({"version": 1, "accuracy": float("nan"), "count": 3}, False),
        ({"version": 1, "accuracy": np.float32("nan"), "count": 3}, False),
        ({"version": 1, "accuracy": 0.5, "count": 2.5}, False),
        ({"version": 1, "accuracy": "high", "count": 3}, False),
        ({"accuracy": 0.5}, False),
        (0.5, False),
        (None, False),
    ],
)
def test_an_evaluation_says_what_it_is_of(value, taken):
    problem = problem_with_evaluation(value)
    assert (problem is None) is taken
    assert problem is None or "expected" in problem
