"""Whether a rollout class of one's own keeps its contract."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group
from gyre.testing.contracts.broken import promise, refused
from gyre.testing.contracts.class_under_test import VertexUnderTest, vertex_of
from gyre.testing.contracts.example_groups import MakeGroups, prompts_of
from gyre.testing.contracts.judges import check_same_groups
from gyre.workloads.protocols import Rollout
from gyre.workloads.vertex.call_info import CallInfo

Export = Callable[[int], tuple[dict[str, Any], bytes]]
"""The weights of a policy by its version, as the actor's `export_weights` gives them."""


def check_rollout(
    cls: type,
    *,
    weights: Export,
    config: Mapping[str, Any] | None = None,
    prompts: MakeGroups | None = None,
    directory: Path | None = None,
) -> None:
    """Raises ContractBroken at the first promise of `Rollout` that the class does not keep.

    `weights(version)` is asked for the versions 1 to 3, which may hold the same weights. `prompts(first, count)` gives
    groups without samples; by default those of the task that `config` names.
    """
    make = prompts or prompts_of(config)
    groups, held_out = make(0, 4), make(100, 3)
    with _one(cls, config, directory) as vertex:
        vertex.require(Rollout)
        _load(vertex, weights, 2)
        _load(vertex, weights, 2)
        samples = _generated(vertex, groups, 2)
        _check_evaluation(vertex, held_out, 2)
        _check_refusals(vertex, weights)
        _generated(vertex, groups, 2)
        _load(vertex, weights, 3)
        _generated(vertex, groups, 3)
    with _one(cls, config, directory) as vertex:
        _load(vertex, weights, 2)
        again = _generated(vertex, groups, 2, step=9)
        promise(
            _same(samples, again),
            "generate(groups), on another vertex,",
            "give the same samples",
            "it gave others",
        )


def _one(cls: type, config: Mapping[str, Any] | None, directory: Path | None) -> Any:
    return vertex_of(cls, "rollout", config=config, directory=directory or Path(tempfile.gettempdir()))


def _load(vertex: VertexUnderTest, weights: Export, version: int) -> None:
    told = vertex.call("load_weights", *weights(version))
    promise(told == version, "load_weights(…)", f"return the version {version}", told)


def _check_refusals(vertex: VertexUnderTest, weights: Export) -> None:
    with refused("load_weights(…) of an older version", "for old weights are never served as new"):
        vertex.call("load_weights", *weights(1))
    manifest, buffer = weights(3)
    damaged = bytearray(buffer)
    damaged[len(damaged) // 2] ^= 0x5A
    with refused("load_weights(…) of damaged bytes", "for they are not the manifest's"):
        vertex.call("load_weights", manifest, bytes(damaged))


def _generated(vertex: VertexUnderTest, groups: list[Group], version: int, *, step: int = 1) -> list[Group]:
    answered = vertex.call("generate", copy.deepcopy(groups), info=CallInfo(step=step, index=0))
    check_same_groups("generate(groups)", groups, answered)
    for group, other in zip(groups, answered, strict=True):
        promise(other.meta == group.meta, "generate(groups)", f"leave group {group.id}'s meta", other.meta)
        promise(bool(other.samples), "generate(groups)", f"give group {group.id} samples", "none came")
        for sample in other.samples:
            _check_sample(sample, version)
    checked: list[Group] = answered
    return checked


def _check_sample(sample: Any, version: int, call: str = "generate(groups)") -> None:
    promise(len(sample.token_ids) > 0, call, "give each sample a token at least", "none came")
    promise(sample.token_ids.dtype == np.int32, call, "give tokens as int32", sample.token_ids.dtype)
    promise(sample.logprobs.dtype == np.float32, call, "give log-probs as float32", sample.logprobs.dtype)
    top = float(sample.logprobs.max())
    kept = bool(np.isfinite(sample.logprobs).all()) and top <= 1e-3
    promise(kept, call, "give log-probs of the tokens", sample.logprobs)
    versions = {run.version for run in sample.versions}
    promise(versions == {version}, call, f"name the policy version of each token, {version}", versions)
    promise(sample.finish_reason in ("stop", "length"), call, "end by stop or length", sample.finish_reason)


def _same(first: list[Group], again: list[Group]) -> bool:
    return all(
        len(group.samples) == len(same.samples)
        and all(
            np.array_equal(one.token_ids, other.token_ids)
            for one, other in zip(group.samples, same.samples, strict=True)
        )
        for group, same in zip(first, again, strict=True)
    )


def _check_evaluation(vertex: VertexUnderTest, groups: list[Group], version: int) -> None:
    first = vertex.call("evaluate", copy.deepcopy(groups), info=CallInfo(step=1, index=0))
    if isinstance(first, list):
        _check_answers(vertex, groups, first, version)
        return
    kept = (
        isinstance(first, dict)
        and {"version", "accuracy", "count"} <= first.keys()
        and (first["accuracy"] is None or _is_finite(first["accuracy"]))
    )
    promise(
        kept,
        "evaluate(groups)",
        'return the groups with samples, or {"version", "accuracy", "count"}, the accuracy a finite number or None',
        first,
    )
    promise(
        first["version"] == version, "evaluate(groups)", f"tell the version that is served, {version}", first
    )
    promise(first["count"] == len(groups), "evaluate(groups)", f"count its {len(groups)} groups", first)
    again = vertex.call("evaluate", copy.deepcopy(groups), info=CallInfo(step=1, index=0))
    promise(again == first, "evaluate(groups), repeated,", f"return {first} again", again)


def _check_answers(vertex: VertexUnderTest, groups: list[Group], answered: list[Group], version: int) -> None:
    call = "evaluate(groups)"
    check_same_groups(call, groups, answered)
    for group in answered:
        promise(bool(group.samples), call, f"give group {group.id} samples", "none came")
        for sample in group.samples:
            _check_sample(sample, version, call)
    again = vertex.call("evaluate", copy.deepcopy(groups), info=CallInfo(step=1, index=0))
    promise(_same(answered, again), f"{call}, repeated,", "give the same samples", "it gave others")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
