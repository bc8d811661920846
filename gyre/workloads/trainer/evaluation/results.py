"""What is computed of an evaluation's rewards: the row that the log, the journal and every display have.

A row says how much the answers earned (`reward_mean`, `reward_std`), how many of them are right (`accuracy`), how many
prompts have a right answer among k (`pass_at`), what the best of k earns (`best_of`), and the same by a column's values
(`by`), and the means of what the reward function returned beside the reward (`components`).

Invariant *accuracy has a meaning or is null*: it is the share of samples that earned the threshold; without one, of
those that the reward function itself calls right by its number `acc` (verl's), and `right_by` says so; without that
there is none: a reward of 1 may be for the format alone. A difference that rounding leaves does not count.

This module is pure: it must not know of policies, vertices or files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.config import JobSpec
from gyre.config.sections import EvaluationSettings, RewardSettings, read_section
from gyre.rollouts.drawn import as_drawn
from gyre.rollouts.samples import MORE, Group
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey
from gyre.workloads.trainer.learning.step_metrics import components

ACC = "acc"
"""The number beside a reward that says of each answer whether it is right, 1 or 0, as verl's functions return it."""
ROUNDING = 1e-6
"""How far a reward may be below the threshold."""
MOST_VALUES = 20
"""Values of a column that have results of their own: those with the most prompts."""
OTHERS = "other"
"""The name of all further values together."""
NO_VALUE = "none"
"""The name of prompts that lack the column."""
VALUE_LENGTH = 64
"""Characters of a value's name."""

Rewards = NDArray[np.float64]


def row_of(
    evaluation: EvaluationKey,
    groups: Sequence[Group],
    metas: Sequence[Mapping[str, Any]],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """The row of scored groups, by their rollouts; `metas` has what the data says of each prompt."""
    groups = [as_drawn(group) for group in groups]
    rewards = [np.array([sample.reward for sample in group.samples], dtype=np.float64) for group in groups]
    right, right_by = _right(rewards, settings.threshold), ""
    if right is None:
        right, right_by = _right_by_acc(groups)
    return {
        "version": evaluation.version,
        "set": evaluation.set,
        "prompts": len(groups),
        **_summary(rewards, right),
        "reward_std": float(np.concatenate(rewards).std()) if _count(rewards) else None,
        "threshold": settings.threshold,
        "right_by": right_by,
        "distinct": len({sample.token_ids.tobytes() for group in groups for sample in group.samples}),
        "components": components(groups),
        "pass_at": _by_size(right, settings.sizes, _pass_at) if right is not None else {},
        "best_of": _by_size(rewards, settings.sizes, best_of),
        "by": _breakdown(rewards, right, [_value(meta, settings.by) for meta in metas])
        if settings.by
        else {},
    }


def row_of_own(value: Mapping[str, Any], name: str, prompts: int) -> dict[str, Any]:
    """The row of a result that a rollout class computed itself: `version`, `accuracy`, `count`, and `reward_mean` and
    `reward_std` where it gives them, as plain data."""
    return {
        "version": value["version"],
        "set": name,
        "prompts": prompts,
        "count": value["count"],
        "reward_mean": value.get("reward_mean"),
        "reward_std": value.get("reward_std"),
        "accuracy": value["accuracy"],
        "threshold": None,
        "right_by": "",
        "distinct": 0,
        "components": {},
        "pass_at": {},
        "best_of": {},
        "by": {},
    }


def right_from(row: Mapping[str, Any]) -> float | None:
    """The reward from which on a sample of this row is right; None where its reward does not say it."""
    return float(row["threshold"]) if row["threshold"] is not None else None


def pass_at(right: int, n: int, k: int) -> float:
    """The chance that one of `k` of the `n` samples is right, `right` of which are: the unbiased estimate of pass@k
    (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def best_of(rewards: Rewards, k: int) -> float:
    """The expected largest reward among `k` of the samples: the unbiased estimate of best-of-k.

    The i-th smallest of n, from 1, is the largest in C(i - 1, k - 1) of the C(n, k) choices of k.
    """
    n = len(rewards)
    share, best = k / n, 0.0  # of the choices in which the largest of all is the largest
    for at, reward in zip(range(n - 1, k - 2, -1), np.sort(rewards)[::-1].tolist(), strict=False):
        best += share * reward
        share *= (at - k + 1) / at if at else 0.0
    return float(best)


def _right(rewards: Sequence[Rewards], threshold: float | None) -> list[Rewards] | None:
    """Of each sample 1 where it is right, else 0; None where that has no meaning."""
    if threshold is None:
        return None
    return [(earned >= threshold - ROUNDING).astype(np.float64) for earned in rewards]


def _right_by_acc(groups: Sequence[Group]) -> tuple[list[Rewards] | None, str]:
    """Of each sample its `acc`, and the name of that number: `reward.acc`, or `reward.FUNCTION.acc` where one of
    several functions returned it. None and "" where not every sample has one that is 0 or 1, or two functions have
    one: then nobody says what is right."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return None, ""
    names = [key for key in samples[0].extras if key.startswith(MORE) and key.rpartition(".")[2] == ACC]
    name = MORE + ACC if MORE + ACC in names else names[0] if len(names) == 1 else ""
    if not name or not all(sample.extras.get(name) in (0, 1) for sample in samples):
        return None, ""
    return [np.array([float(one.extras[name]) for one in group.samples]) for group in groups], name


def _summary(rewards: Sequence[Rewards], right: Sequence[Rewards] | None) -> dict[str, Any]:
    count = _count(rewards)
    return {
        "count": count,
        "reward_mean": float(np.concatenate(rewards).mean()) if count else None,
        "accuracy": float(np.concatenate(right).mean()) if right is not None and count else None,
    }


def _pass_at(right: Rewards, k: int) -> float:
    return pass_at(int(right.sum()), len(right), k)


def _by_size(
    samples: Sequence[Rewards], sizes: Sequence[int], estimate: Callable[[Rewards, int], float]
) -> dict[str, float]:
    """The mean over prompts of an estimate, for each k for which every prompt has enough samples."""
    fewest = min((len(of_one) for of_one in samples), default=0)
    return {str(k): float(np.mean([estimate(of_one, k) for of_one in samples])) for k in sizes if k <= fewest}


def _breakdown(
    rewards: Sequence[Rewards], right: Sequence[Rewards] | None, values: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By each value, those with the most prompts first; equally many in the order of their names."""
    ranked = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) > MOST_VALUES:
        named = {value for value, _ in ranked[: MOST_VALUES - 1]}
        values = [value if value in named else OTHERS for value in values]
        ranked = [one for one in ranked if one[0] in named and one[0] != OTHERS] + [(OTHERS, 0)]
    found = {}
    for name, _ in ranked:
        at = [index for index, value in enumerate(values) if value == name]
        found[name] = _summary(
            [rewards[index] for index in at], None if right is None else [right[index] for index in at]
        )
    return found


def _value(meta: Mapping[str, Any], column: str) -> str:
    value = meta.get(column)
    return NO_VALUE if value is None else str(value)[:VALUE_LENGTH]


def _count(samples: Sequence[Rewards]) -> int:
    return sum(len(of_one) for of_one in samples)


RIGHT = 1.0
_REWARDS = "gyre.workloads.rewards"
_EXACT = "ExactMatchReward"
_FUNCTIONS = ("exact_match", "math_verify")
"""The functions of Gyre's own, which return 1.0 for a right answer and else 0.0."""


def evaluation_of(spec: JobSpec) -> EvaluationSettings:
    """The section `evaluation`, with `threshold` where the job does not say it and its rewards are Gyre's own of right
    and wrong. Of any other reward nobody knows, for 1 may stand for a format that was kept. Raises ConfigError."""
    settings = read_section(EvaluationSettings, spec.config, "evaluation")
    if settings.threshold is None and tells_right(spec):
        return settings.model_copy(update={"threshold": RIGHT})
    return settings


def tells_right(spec: JobSpec) -> bool:
    """Whether a reward of Gyre's own says of each answer that it is right or wrong."""
    entrypoints = [role.entrypoint for role in spec.roles.values() if role.entrypoint is not None]
    own = {entrypoint.name for entrypoint in entrypoints if entrypoint.module == _REWARDS}
    function = read_section(RewardSettings, spec.config, "reward").function
    return _EXACT in own or ("PythonReward" in own and function in _FUNCTIONS)
