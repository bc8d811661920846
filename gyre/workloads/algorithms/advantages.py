"""Advantages: how much better a token was than expected, from rewards and, with a critic, from values.

Invariants:
- *one group at a time*: a group's advantages depend on that group alone, so they are the same however a mini-batch is
  cut; what needs the whole batch (whitening) is not done;
- *one a rollout*: what is compared are rollouts, whatever number of rows each has: mean and deviation are over these,
  the KL penalty of all rows is their rollout's, and of `gae` the drawn tokens are one trajectory, row after row, in
  which a value follows on that of the drawn token before it. Where a token was not drawn the advantage is 0;
- *exact zeros*: a group whose samples earned the same, but for rounding, has advantages of exactly 0, and no gradient.

Sources: GRPO (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783); RLOO (Kool et al., "Buy 4 REINFORCE samples, get a
baseline for free!", 2019; arXiv 2402.14740); GAE (arXiv 1506.02438); a KL penalty in the reward as in InstructGPT
(arXiv 2203.02155).

This module must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gyre.config.plugins import ADVANTAGE
from gyre.config.sections import LossSettings
from gyre.rollouts.drawn import as_drawn, on_rows
from gyre.rollouts.samples import Group, Sample
from gyre.workloads.algorithms.options import with_options

STD_EPS = 1e-6
ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""How far the rewards of a group may be apart, as a part of the largest, and still be the same: what is left of
rounding where a reward function computes in float32. Divided by its own deviation it would become an advantage of 1."""

Values = NDArray[np.float64]


def group_normalised(rewards: ArrayLike) -> Values:
    """GRPO: `(r - mean) / (deviation + 1e-6)` of float64 `[..., n]`, the deviation over `n`."""
    centred = mean_only(rewards)
    if not centred.size:
        return centred
    deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True))
    normalised: Values = centred / (deviation + STD_EPS)
    return normalised


def earned_the_same(rewards: ArrayLike) -> bool:
    """Whether the rewards of a group are the same but for rounding, so that to compare its samples teaches nothing."""
    values = np.asarray(rewards, dtype=np.float64).tolist()  # of a few numbers numpy's minimum takes longer
    if len(values) < 2:
        return True
    low, high = min(values), max(values)
    return not any(map(math.isnan, values)) and high - low <= ROUNDING * max(abs(low), abs(high))


def _alike(values: Values) -> NDArray[np.bool_]:
    """`earned_the_same` of each row of float64 `[..., n]`, as `[...]`."""
    low, high = values.min(axis=-1), values.max(axis=-1)
    alike: NDArray[np.bool_] = high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))
    return alike


def mean_only(rewards: ArrayLike) -> Values:
    """Dr. GRPO: `r - mean` of float64 `[..., n]`."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape[-1] < 2:
        return np.zeros_like(values)
    centred: Values = values - values.mean(axis=-1, keepdims=True)
    centred[_alike(values)] = 0.0
    return centred


def leave_one_out(rewards: ArrayLike) -> Values:
    """RLOO, of float64 `[..., n]`: what a sample earned beyond the mean of the others; of a group of one, what it
    earned."""
    values = np.asarray(rewards, dtype=np.float64)
    n: int = values.shape[-1]
    if n < 2:
        return values.copy()
    return mean_only(values) * (n / (n - 1))


def gae(rewards: ArrayLike, values: ArrayLike, *, gamma: float, lam: float) -> tuple[Values, Values]:
    """Advantages and returns, both float64 `[t]`, of a trajectory's rewards and values `[t]`.

    The value after the last token is 0: a sample ends there, also one that was cut off by its length.
    """
    earned, expected = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    following = np.append(expected[1:], 0.0) if expected.size else expected
    deltas = earned + gamma * following - expected
    advantages = np.zeros_like(deltas)
    carried = 0.0
    for at in range(deltas.size - 1, -1, -1):
        carried = deltas[at] + gamma * lam * carried
        advantages[at] = carried
    return advantages, advantages + expected


def token_rewards(sample: Sample, settings: LossSettings) -> Values:
    """float64 `[t]`: the sample's reward at its last token, and the KL penalty at every one.

    Raises ValueError for a sample without reward, or without `ref_logprobs` where the penalty is on.
    """
    if sample.reward is None:
        raise ValueError("a sample has no reward: score it before training on it")
    rewards = np.zeros(len(sample.token_ids))
    if settings.kl_reward_coef > 0:
        rewards -= settings.kl_reward_coef * (sample.logprobs.astype(np.float64) - reference_of(sample))
    if rewards.size:
        rewards[-1] += sample.reward
    return rewards


def reference_of(sample: Sample) -> NDArray[np.float32]:
    """`extras["ref_logprobs"]`. Raises ValueError where there are none."""
    return _extra(sample, "ref_logprobs", "a KL term is on", "add a reference role")


def values_of(sample: Sample) -> NDArray[np.float32]:
    """`extras["values"]`. Raises ValueError where there are none."""
    return _extra(sample, "values", "loss.adv_estimator is gae", "add a critic role (recipe ppo)")


def _extra(sample: Sample, name: str, why: str, what: str) -> NDArray[np.float32]:
    found = sample.extras.get(name)
    if found is None:
        raise ValueError(f"{why}, but a sample has no {name}: {what}")
    if len(found) != len(sample.token_ids):
        raise ValueError(f"a sample of {len(sample.token_ids)} tokens came with {len(found)} {name}")
    return np.asarray(found, dtype=np.float32)


def advantages_of(groups: Sequence[Group], settings: LossSettings) -> list[NDArray[np.float32]]:
    """Token by token, float32 `[t]` each, for every sample in the order of groups and samples.

    Raises ValueError for a sample without reward, or without what the estimator needs.
    """
    for group in groups:
        if any(sample.reward is None for sample in group.samples):
            raise ValueError(f"group {group.id} has samples without a reward: score it before training on it")
    rollouts = [as_drawn(group) for group in groups]
    found = iter(_of_rollouts(rollouts, settings))
    return [
        row
        for group, drawn in zip(groups, rollouts, strict=True)
        for row in on_rows(group, list(islice(found, len(drawn.samples))))
    ]


def returns_of(group: Group, settings: LossSettings) -> list[NDArray[np.float32]]:
    """By the values in the extras, float32 `[t]` for every sample; 0 where a token was not drawn. Raises ValueError as
    `gae_of`."""
    return on_rows(
        group,
        [
            gae_of(sample, settings)[1] if len(sample.token_ids) else np.zeros(0, np.float32)
            for sample in as_drawn(group).samples
        ],
    )


def _of_rollouts(groups: Sequence[Group], settings: LossSettings) -> list[NDArray[np.float32]]:
    """As `advantages_of`, of groups whose samples are rollouts of drawn tokens."""
    if settings.estimator is not None and settings.estimator.by_values:
        return [gae_of(sample, settings)[0] for group in groups for sample in group.samples]
    totals = [_totals(group, settings) for group in groups]
    if settings.adv_estimator in GROUP_ESTIMATORS:
        return _each(groups, _estimates(totals, settings.adv_estimator), settings.adv_estimator)
    found: list[NDArray[np.float32]] = []
    for group, of_group in zip(groups, totals, strict=True):
        estimates = advantage_of(settings)(group, np.asarray(of_group, dtype=np.float64))
        found += _by_token(group, estimates, settings.adv_estimator)
    return found


def _totals(group: Group, settings: LossSettings) -> list[float]:
    if settings.kl_reward_coef > 0:
        return [float(token_rewards(sample, settings).sum()) for sample in group.samples]
    return [float(sample.reward or 0.0) for sample in group.samples]


def _estimates(totals: Sequence[list[float]], name: str) -> list[Values]:
    """Of each group float64 `[n]`. Groups of one size are computed together, each by its own rewards alone."""
    by_size: dict[int, list[int]] = {}
    for at, of_group in enumerate(totals):
        by_size.setdefault(len(of_group), []).append(at)
    found: list[Values] = [np.empty(0)] * len(totals)
    for places in by_size.values():
        estimates = GROUP_ESTIMATORS[name]([totals[at] for at in places])
        for at, of_group in zip(places, estimates, strict=True):
            found[at] = of_group
    return found


class Advantage(Protocol):
    """An estimator brought by `config.loss.adv_estimator`; see docs/bring-your-own.md."""

    def __call__(self, group: Group, rewards: Values, /) -> Sequence[ArrayLike]:
        """Of each sample a number, or float `[t]` token by token. `rewards`, float64 `[n]`, have the KL penalty. The
        samples are the group's rollouts: of one in several rows, or with tokens that were not drawn, what was drawn,
        as `gyre.rollouts.drawn.as_drawn` has it."""
        ...


def advantage_of(settings: LossSettings) -> Advantage:
    """The estimator of the user's own that `settings.adv_estimator` names, with its options. Raises ConfigError."""
    return cast(
        Advantage,
        with_options(ADVANTAGE, settings.adv_estimator, "config.loss.adv_options", settings.adv_options),
    )


def _each(groups: Sequence[Group], estimates: Sequence[Values], name: str) -> list[NDArray[np.float32]]:
    """As `_by_token`, of one number a sample: they are looked at together. Raises ValueError for no number."""
    if not groups:
        return []
    values = np.concatenate(estimates).astype(np.float32)
    if not np.isfinite(values).all():
        wrong = next(at for at, one in enumerate(estimates) if not np.isfinite(one.astype(np.float32)).all())
        raise ValueError(_not_finite(name, groups[wrong]))
    lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
    joined = np.repeat(values, lengths)
    return [joined[start:end] for start, end in pairwise([0, *accumulate(lengths)])]


def _not_finite(name: str, group: Group) -> str:
    return f"{name} gave an advantage of group {group.id} that is not a finite number"


def _by_token(group: Group, estimates: Sequence[ArrayLike], name: str) -> list[NDArray[np.float32]]:
    """Of each sample float32 `[t]`. Raises ValueError for another number of estimates, a wrong length or no number."""
    if len(estimates) != len(group.samples):
        raise ValueError(
            f"{name} gave {len(estimates)} advantages for the {len(group.samples)} samples of group {group.id}"
        )
    found = []
    for sample, estimate in zip(group.samples, estimates, strict=True):
        values, length = np.asarray(estimate, dtype=np.float32), len(sample.token_ids)
        if values.ndim and values.shape != (length,):
            raise ValueError(
                f"{name} gave an advantage of shape {values.shape} for a sample of {length} tokens"
            )
        if not np.isfinite(values).all():
            raise ValueError(_not_finite(name, group))
        found.append(np.array(np.broadcast_to(values, (length,))))
    return found


def gae_of(sample: Sample, settings: LossSettings) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A sample's advantages and returns, float32 `[t]`, by the values in its extras."""
    advantages, returns = gae(
        token_rewards(sample, settings), values_of(sample), gamma=settings.gamma, lam=settings.lam
    )
    return advantages.astype(np.float32), returns.astype(np.float32)


GROUP_ESTIMATORS = {"grpo": group_normalised, "dr_grpo": mean_only, "rloo": leave_one_out}
"""The formulas of those that compare a sample with the others of its group."""
