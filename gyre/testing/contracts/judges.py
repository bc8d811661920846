"""Whether what judges samples keeps its contract: rewards and references."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.testing.contracts.broken import promise
from gyre.testing.contracts.class_under_test import VertexUnderTest, vertex_of
from gyre.testing.contracts.example_groups import MakeGroups, groups_of, ids_of
from gyre.workloads.protocols import Reference, Reward, scores_each_sample
from gyre.workloads.vertex.call_info import CallInfo
from gyre.workloads.vertex.slim_groups import SlimGroups

ROUNDING = 1e-3
"""A model may compute other groups beside a group, which changes its last bits."""


def check_reward(
    cls: type,
    *,
    config: Mapping[str, Any] | None = None,
    groups: MakeGroups | None = None,
    directory: Path | None = None,
) -> None:
    """Raises ContractBroken at the first promise of `Reward` that the class does not keep.

    `groups(first, count)` gives groups with samples; by default they are over the task that `config` names, with
    answers at random.
    """
    make = groups or groups_of(config)
    given = _unjudged(make(0, 3))
    given[1].samples.append(_empty())  # a sample may have no tokens
    given[2].id = -3  # as a held-out group has it
    with _one(cls, "reward", config, directory) as vertex:
        vertex.require(Reward)
        rewards = _scored(vertex, given)
    with _one(cls, "reward", config, directory) as vertex:
        _scored(vertex, _unjudged(make(10, 2)))
        again = _scored(vertex, given)
        promise(again == rewards, "score(groups), on another vertex,", f"give {rewards} again", again)
        backwards = _scored(vertex, given[::-1])
        pairs = zip(backwards[::-1], rewards, strict=True)
        alike = all(np.allclose(one, other, atol=ROUNDING) for one, other in pairs)
        promise(alike, "score(groups)", f"score each group by itself, {rewards}", backwards[::-1])
        if scores_each_sample(cls):
            alone = [
                [_scored(vertex, SlimGroups.of([part]).groups())[0][0] for part in _one_by_one(group)]
                for group in given
            ]
            pairs = zip(alone, rewards, strict=True)
            alike = all(np.allclose(one, other, atol=ROUNDING) for one, other in pairs)
            call = "score(groups) of a class with SCORES_EACH_SAMPLE"
            promise(alike, call, f"score each sample by itself, {rewards}", alone)


def check_reference(
    cls: type,
    *,
    config: Mapping[str, Any] | None = None,
    groups: MakeGroups | None = None,
    directory: Path | None = None,
    policy: tuple[dict[str, Any], bytes] | None = None,
) -> None:
    """Raises ContractBroken at the first promise of `Reference` that the class does not keep.

    `policy`, as the actor's `export_weights` gives it, is for a class with `load_weights`.
    """
    given = _unjudged((groups or groups_of(config))(0, 3))
    found = []
    for _ in range(2):
        with _one(cls, "reference", config, directory) as vertex:
            vertex.require(Reference)
            if policy is not None and vertex.has("load_weights"):
                for _ in range(2):
                    version = vertex.call("load_weights", *policy)
                    promise(
                        version == policy[0]["version"],
                        "load_weights(…)",
                        "return the policy's version",
                        version,
                    )
            for _ in range(2):
                answered = vertex.call("logprobs", given, info=CallInfo(step=1, index=0))
                check_extras("logprobs(groups)", given, answered, "ref_logprobs")
                found.append(_extras(answered, "ref_logprobs"))
    top = max(float(row.max(initial=0.0)) for row in found[0])
    promise(top <= 1e-3, "logprobs(groups)", "give logarithms of probabilities", f"{top:g} came")
    for again in found[1:]:
        same = all(np.array_equal(one, other) for one, other in zip(found[0], again, strict=True))
        promise(same, "logprobs(groups), on whatever vertex,", "give the same", "it gave others")


def check_same_groups(call: str, given: Sequence[Group], answered: Any) -> None:
    """The answer is the groups that were given, in order, with their prompts and samples."""
    kept = isinstance(answered, list) and all(isinstance(group, Group) for group in answered)
    promise(kept, call, "return the list of groups that it was given", type(answered).__name__)
    promise(
        ids_of(answered) == ids_of(list(given)),
        call,
        f"return the groups {ids_of(list(given))} in this order",
        ids_of(answered),
    )
    for group, other in zip(given, answered, strict=True):
        promise(
            np.array_equal(group.prompt_ids, other.prompt_ids),
            call,
            f"leave group {group.id}'s prompt",
            "it differs",
        )


def check_same_samples(call: str, given: Sequence[Group], answered: Sequence[Group]) -> None:
    for group, other in zip(given, answered, strict=True):
        promise(
            len(other.samples) == len(group.samples),
            call,
            f"leave the {len(group.samples)} samples of group {group.id}",
            f"{len(other.samples)} came",
        )
        for sample, its in zip(group.samples, other.samples, strict=True):
            same = np.array_equal(sample.token_ids, its.token_ids) and np.array_equal(
                sample.logprobs, its.logprobs, equal_nan=True
            )
            promise(same, call, f"leave the tokens and log-probs of group {group.id}", "they differ")


def check_extras(call: str, given: Sequence[Group], answered: Any, key: str) -> None:
    """Each sample has a finite float32 for each of its tokens."""
    check_same_groups(call, given, answered)
    check_same_samples(call, given, answered)
    for group in answered:
        for sample in group.samples:
            row = sample.extras.get(key)
            kept = (
                isinstance(row, np.ndarray)
                and row.dtype == np.float32
                and row.shape == (len(sample.token_ids),)
            )
            told = f"{row.dtype} {row.shape}" if isinstance(row, np.ndarray) else type(row).__name__
            promise(
                kept, call, f'set extras["{key}"] to float32 [{len(sample.token_ids)}] on every sample', told
            )
            promise(bool(np.isfinite(row).all()), call, f'set extras["{key}"] to finite numbers', row)


def _one(cls: type, role: str, config: Mapping[str, Any] | None, directory: Path | None) -> Any:
    return vertex_of(cls, role, config=config, directory=directory or Path(tempfile.gettempdir()))


def _scored(vertex: VertexUnderTest, groups: list[Group]) -> list[list[float]]:
    answered = vertex.call("score", copy.deepcopy(groups), info=CallInfo(step=1, index=0))
    check_same_groups("score(groups)", groups, answered)
    check_same_samples("score(groups)", groups, answered)
    for group in answered:
        for sample in group.samples:
            reward = sample.reward
            kept = isinstance(reward, int | float | np.number) and math.isfinite(float(reward))
            promise(kept, "score(groups)", f"set a finite reward on every sample of group {group.id}", reward)
    return [[float(sample.reward) for sample in group.samples] for group in answered]


def _one_by_one(group: Group) -> list[Group]:
    return [Group(group.id, group.prompt_ids, group.meta, [sample]) for sample in group.samples]


def _unjudged(groups: list[Group]) -> list[Group]:
    for group in groups:
        for sample in group.samples:
            sample.reward, sample.extras = None, {}
    return groups


def _extras(groups: Sequence[Group], key: str) -> list[np.ndarray]:
    return [sample.extras[key] for group in groups for sample in group.samples]


def _empty() -> Sample:
    nothing = np.zeros(0, dtype=np.int32)
    return Sample(nothing, np.zeros(0, dtype=np.float32), (VersionRun(0, 0, 0),), finish_reason="length")
