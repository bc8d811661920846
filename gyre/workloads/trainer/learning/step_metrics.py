"""What the samples of a step say of it: rewards, lengths, ages, and groups that teach nothing.

Invariants:
- *numbers only*: every value is a finite int or float, so that it goes through JSON and Prometheus as it is;
- *one pass*: a step of a thousand samples costs the trainer's thread about a millisecond, and half of one more for each
  number that the reward function returned beside the reward.

Pure: `at` and `seconds` are arguments. The names are in `gyre.workloads.trainer.learning.metric_names`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from gyre.rollouts.drawn import as_drawn
from gyre.rollouts.samples import MORE, Group
from gyre.workloads.algorithms.advantages import earned_the_same
from gyre.workloads.trainer.learning.session_metrics import session_metrics

MOST_COMPONENTS = 48
"""Numbers beside the reward that a step has: the names that most of its samples have. A function whose names differ
from sample to sample would fill the journal, and every sink."""

COUNT = ".count"
"""After the name of a component that not every sample has: how many have it."""

_NO_NAME = re.compile(r"[^A-Za-z0-9_./-]")
"""What a name keeps is what every sink takes: MLflow refuses a batch with any other character."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the job has while a step is made: `gpus`, 0 where its devices are none, and their price an hour, None where
    it is not known."""

    gpus: float = 0.0
    price_per_hour: float | None = None


def step_metrics(
    learner: Mapping[str, Any],
    groups: Sequence[Group],
    step: int,
    *,
    at: float,
    seconds: float,
    reserved: Reserved = Reserved(),
) -> dict[str, Any]:
    """The metrics of a step: those of the `learner` that are finite numbers, and those of the `groups` that it
    trained; and what its time came to of what is `reserved`. A sample is a rollout, in however many rows it is trained,
    and its tokens are those that were drawn."""
    of_sessions = session_metrics(groups)
    groups = [as_drawn(group) for group in groups]
    tokens = sum(group.token_count for group in groups)
    return {
        **{name: value for name, value in learner.items() if is_number(value)},
        **_of_samples(groups),  # also where a learner says them: its sums are of float32
        **components(groups),
        **of_sessions,
        "step": step,
        "version": step,
        "at": round(at, 3),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / max(seconds, 1e-9),
        **_staleness_of(groups, step),
        **_worth(learner, tokens, seconds, reserved),
    }


def _worth(learner: Mapping[str, Any], tokens: int, seconds: float, reserved: Reserved) -> dict[str, float]:
    """What the step's time was worth. MFU (Chowdhery et al. 2022, "PaLM", 4.1) is the model's operations in the step
    over those that the learner's GPUs could have made in its `seconds`, waiting included; `gyre.models.flops` has the
    operations, `gyre.workloads.learner.cards` the GPUs."""
    found: dict[str, float] = {}
    flops, peak = learner.get("model_flops"), learner.get("peak_flops")
    if is_number(flops) and is_number(peak) and peak and seconds > 0:
        found["mfu"] = flops / (peak * seconds)
    if reserved.gpus and seconds > 0:
        found["tokens_per_s_per_gpu"] = tokens / seconds / reserved.gpus
    if reserved.price_per_hour is not None:
        found["cost"] = reserved.price_per_hour * seconds / HOUR_S
        if tokens:
            found["cost_per_million_tokens"] = found["cost"] / tokens * 1e6
    return found


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_flat(group: Group) -> bool:
    """Whether all samples of the group earned the same, so that none is better than the group's baseline. Rows of a
    rollout have its reward, so that they change nothing."""
    return earned_the_same([sample.reward or 0.0 for sample in group.samples])


def _of_samples(groups: Sequence[Group]) -> dict[str, Any]:
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {"groups": len(groups), "samples": 0}
    count = len(samples)
    rewards = [sample.reward or 0.0 for sample in samples]
    lengths = [len(sample.token_ids) for sample in samples]
    mean = math.fsum(rewards) / count
    flat = sum(map(is_flat, groups))
    found = {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / count)
        if min(rewards) != max(rewards)
        else 0.0,
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "groups": len(groups),
        "samples": count,
        "prompt_tokens_mean": sum(len(group.prompt_ids) for group in groups) / len(groups),
        "completion_tokens_mean": sum(lengths) / count,
        "completion_tokens_max": max(lengths),
        "cut_off_ratio": sum(sample.finish_reason == "length" for sample in samples) / count,
        "flat_groups": flat,
        "flat_groups_ratio": flat / len(groups),
    }
    return {name: value for name, value in found.items() if is_number(value)}


def components(groups: Sequence[Group]) -> dict[str, Any]:
    """What the reward function returned beside its rewards: of each name the mean, as `reward.NAME`, over the samples
    that have it, and `reward.NAME.count` where some have not. A character that a sink would refuse is `_`; of two names
    of a sample that become one the first counts."""
    samples = [sample for group in groups for sample in group.samples]
    values: dict[str, list[float]] = {}
    names: dict[Any, str] = {}
    """The metric's name of each key of the extras; "" of a key that is no component."""
    for sample in samples:
        seen = set()
        for key, value in sample.extras.items():
            name = names.get(key)
            if name is None:
                name = names[key] = _metric_name(key)
            if name and name not in seen and is_number(value):
                seen.add(name)
                values.setdefault(name, []).append(value)
    most = sorted(values, key=lambda name: (-len(values[name]), name))[:MOST_COMPONENTS]
    found: dict[str, Any] = {}
    for name in sorted(most):
        mean = math.fsum(values[name]) / len(values[name])
        if math.isfinite(mean):
            found[name] = mean
            if len(values[name]) < len(samples):
                found[f"{name}{COUNT}"] = len(values[name])
    return found


def _metric_name(key: object) -> str:
    return _NO_NAME.sub("_", key) if isinstance(key, str) and key.startswith(MORE) else ""


def _staleness_of(trained: Sequence[Group], step: int) -> dict[str, float]:
    """By how many versions the step's policy was ahead of the oldest token, and of a token on average."""
    oldest, ages, tokens = 0, 0, 0
    for group in trained:
        for sample in group.samples:
            tokens += len(sample.token_ids)
            for run in sample.versions:
                age = step - 1 - run.version
                oldest = max(oldest, age)
                ages += age * (run.end - run.start)
    return {"staleness_max": oldest, "staleness_mean": ages / max(tokens, 1)}
