"""Advantages against their definitions, written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config.sections import LossSettings
from gyre.rollouts.drawn import as_drawn
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.algorithms.advantages import (
    advantages_of,
    earned_the_same,
    gae,
    gae_of,
    group_normalised,
    leave_one_out,
    mean_only,
    token_rewards,
)
from tests.rollout_rows import sessions

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=9)
TRACES = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12)


def sample(tokens, reward, **extras):
    return Sample(
        np.arange(tokens, dtype=np.int32),
        np.linspace(-1, -2, tokens, dtype=np.float32),
        (VersionRun(0, 0, tokens),),
        reward=reward,
        extras=extras,
    )


def group(*samples):
    return Group(0, np.zeros(1, dtype=np.int32), samples=list(samples))


@given(REWARDS)
def test_leave_one_out_is_the_reward_beyond_the_others_mean(rewards):
    found = leave_one_out(rewards)
    for at, reward in enumerate(rewards):
        others = [other for k, other in enumerate(rewards) if k != at]
        expected = reward - sum(others) / len(others) if others else reward
        if others and earned_the_same(rewards):
            expected = 0.0
        assert found[at] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(REWARDS)
def test_the_mean_is_taken_off_and_the_deviation_divided_by(rewards):
    values = np.array(rewards)
    if earned_the_same(rewards):
        values[:] = values[0]
    assert mean_only(rewards) == pytest.approx(values - values.mean(), rel=1e-12, abs=1e-12)
    expected = (values - values.mean()) / (values.std() + 1e-6)
    # Where all are nearly equal, what rounding leaves of the mean is divided by 1e-6.
    rounding = 4 * np.spacing(np.abs(values).max()) / 1e-6
    assert group_normalised(rewards) == pytest.approx(expected, rel=1e-9, abs=max(rounding, 1e-9))


@pytest.mark.parametrize("estimate", [group_normalised, mean_only, leave_one_out])
def test_equal_rewards_have_exactly_no_advantage(estimate):
    assert estimate([0.1] * 7).tolist() == [0.0] * 7
    assert estimate([]).tolist() == []


@pytest.mark.parametrize("estimate", [group_normalised, mean_only, leave_one_out])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3, 0.3],
        [np.float32(0.95), 0.95, 0.95],
        [np.float32(123.4), 123.4, 123.4],
        [-1e6 / 3, np.float32(-1e6 / 3)],
        [0.1 + 0.2 + 0.7, 1.0],
        [0.0, -0.0],
    ],
)
def test_what_rounding_leaves_is_no_advantage(estimate, rewards):
    assert not estimate(rewards).any()
    assert earned_the_same(rewards)


@pytest.mark.parametrize("rewards", [[0.0, 1e-9], [1.0, 1.00001], [100.0, 100.01], [1e6, 1e6 + 1]])
def test_a_small_difference_is_one(rewards):
    first, second = mean_only(rewards)
    assert first < 0 < second
    assert not earned_the_same(rewards)


@given(TRACES, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_temporal_differences(trace, gamma, lam):
    rewards, values = (list(column) for column in zip(*trace, strict=True))
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    for at in range(len(trace)):
        expected = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[at:]))
        assert advantages[at] == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert returns[at] == pytest.approx(expected + values[at], rel=1e-12, abs=1e-12)


def test_with_lambda_1_a_return_is_all_that_follows():
    _, returns = gae([1.0, 0.0, 2.0], [5.0, -3.0, 9.0], gamma=1.0, lam=1.0)
    assert returns.tolist() == [3.0, 2.0, 2.0]
    advantages, _ = gae([1.0, 0.0, 2.0], [5.0, -3.0, 9.0], gamma=1.0, lam=0.0)
    assert advantages.tolist() == [-7.0, 12.0, -7.0]


def test_a_group_s_advantage_stands_at_every_token():
    first, second = advantages_of([group(sample(3, 1.0), sample(2, 0.0))], LossSettings(adv_estimator="rloo"))
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0, 1.0], [-1.0, -1.0])
    assert first.dtype == np.float32


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(st.lists(st.lists(st.floats(-9, 9), max_size=20), max_size=8))
def test_a_group_s_advantages_are_the_same_bits_beside_other_groups(estimator, rewards):
    groups = [group(*(sample(1 + at % 3, reward) for at, reward in enumerate(one))) for one in rewards]
    settings = LossSettings(adv_estimator=estimator)
    alone = [advantages.tobytes() for one in groups for advantages in advantages_of([one], settings)]
    assert [advantages.tobytes() for advantages in advantages_of(groups, settings)] == alone


def test_values_of_a_critic_make_advantages_token_by_token():
    settings = LossSettings(adv_estimator="gae", gamma=1.0, lam=1.0)
    one = sample(3, 1.0, values=np.array([0.5, 0.25, 2.0], dtype=np.float32))
    assert advantages_of([group(one)], settings)[0].tolist() == [0.5, 0.75, -1.0]
    assert gae_of(one, settings)[1].tolist() == [1.0, 1.0, 1.0]


def test_the_divergence_from_the_reference_is_a_penalty_at_every_token():
    settings = LossSettings(kl_reward_coef=0.1)
    one = sample(2, 1.0, ref_logprobs=np.array([-2.0, -2.0], dtype=np.float32))
    assert token_rewards(one, settings) == pytest.approx([-0.1, 1.0])
    other = sample(1, 0.0, ref_logprobs=np.array([-1.0], dtype=np.float32))
    first, second = advantages_of(
        [group(one, other)], LossSettings(adv_estimator="dr_grpo", kl_reward_coef=0.1)
    )
    assert (first[0], second[0]) == (pytest.approx(0.45), pytest.approx(-0.45))


@pytest.mark.parametrize(
    ("one", "settings", "sentence"),
    [
        (sample(2, None), LossSettings(), "score it"),
        (sample(2, 1.0), LossSettings(adv_estimator="gae"), "critic"),
        (sample(2, 1.0), LossSettings(kl_reward_coef=0.1), "reference"),
        (
            sample(2, 1.0, values=np.zeros(3)),
            LossSettings(adv_estimator="gae"),
            "2 tokens came with 3 values",
        ),
    ],
)
def test_what_is_missing_is_named(one, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        advantages_of([group(one)], settings)


ESTIMATORS = [
    {"adv_estimator": "grpo"},
    {"adv_estimator": "dr_grpo", "kl_reward_coef": 0.1},
    {"adv_estimator": "rloo", "kl_reward_coef": 0.1},
    {"adv_estimator": "gae", "lam": 0.9, "gamma": 0.95, "kl_reward_coef": 0.1},
    {"adv_estimator": f"{__name__}:by_place"},
]


def by_place(group, rewards):
    """An estimator of a user's own: of each sample a number for each token."""
    return [
        reward * np.arange(1, len(sample.token_ids) + 1)
        for sample, reward in zip(group.samples, rewards, strict=True)
    ]


@pytest.mark.parametrize("settings", ESTIMATORS)
@given(seed=st.integers(0, 2**20))
def test_rows_have_the_advantage_of_their_rollout_whatever_is_between(settings, seed):
    """The advantages are those of rollouts that have what was drawn and nothing else."""
    settings = LossSettings(**settings)
    groups = sessions(0, 2, seed=seed)
    whole = [as_drawn(one) for one in groups]
    expected = iter(advantages_of(whole, settings))
    found = iter(advantages_of(groups, settings))
    for one in groups:
        by_rollout = {number: next(expected) for number in dict.fromkeys(s.rollout for s in one.samples)}
        for row in one.samples:
            advantages = next(found)
            assert advantages.shape == row.token_ids.shape
            assert not advantages[~row.mask].any()
            mine, by_rollout[row.rollout] = np.split(by_rollout[row.rollout], [row.drawn])
            assert advantages[row.mask].tolist() == mine.tolist()
        assert not any(len(left) for left in by_rollout.values())


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_rollout_counts_once_in_mean_and_deviation_however_many_rows_it_has(estimator):
    settings = LossSettings(adv_estimator=estimator)
    rows = [replace(sample(2, reward), rollout=rollout) for rollout, reward in ((0, 1.0), (1, 0.0), (2, 0.0))]
    one_each = advantages_of([group(*rows)], settings)
    many = advantages_of([group(rows[0], rows[1], rows[0], rows[0], rows[2])], settings)
    plain = advantages_of([group(sample(2, 1.0), sample(2, 0.0), sample(2, 0.0))], settings)
    assert [row.tolist() for row in one_each] == [row.tolist() for row in plain]
    assert [row.tolist() for row in many] == [plain[at].tolist() for at in (0, 1, 0, 0, 2)]
