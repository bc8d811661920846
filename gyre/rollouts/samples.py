"""Prompts, groups and samples: what flows along the durable edges of the graph.

A prompt is sampled `n` times; the `n` samples are its group. A group is the unit that is drawn, generated,
scored, trained and accounted for: its `id` is its position in the job's endless sequence of prompts, so
two runs of the same job name the same prompt by the same number.

Invariant *every token knows its policy*: a sample's `versions` are runs that cover its tokens exactly.

This module must not know about Ray, torch or databases: arrays are numpy's, the wire form is msgpack.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

WIRE_FORMAT = 1

OWN_LIMIT = "max_new_tokens"
"""The key of a group's `meta` that limits its samples' length, in tokens."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Tokens `start..end` (end exclusive) of a sample were produced by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Sample:
    """One trajectory.

    `token_ids`: int32 `[t]`, the generated tokens without the prompt. `logprobs`: float32 `[t]`, under the
    policy that produced each token. `finish_reason`: `stop` or `length`. `reward` is None until scored.
    `extras` holds what further operators add, as scalars or arrays of `t` (reference log-probs, values).
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    finish_reason: str = "stop"
    reward: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a sample of {len(self.token_ids)} tokens came with {len(self.logprobs)} log-probs"
            )
        covered = 0
        for run in self.versions:
            if run.start != covered or run.end < run.start:
                raise ValueError(f"version runs {self.versions} leave a gap at token {covered}")
            covered = run.end
        if covered != len(self.token_ids):
            raise ValueError(f"version runs cover {covered} of {len(self.token_ids)} tokens")


@dataclass(slots=True)
class Group:
    """A prompt and its samples. `meta` is what the dataset said of the prompt (the answer, say)."""

    id: int
    prompt_ids: NDArray[np.int32]
    meta: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def token_limit(self, most: int) -> int:
        """The longest that a sample of it may become, in tokens: `most`, or its own limit where that is lower. Raises
        ValueError where its own limit is no positive integer."""
        own = self.meta.get(OWN_LIMIT)
        if own is None:
            return most
        return min(most, checked_limit(own, f"group {self.id}"))

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version among the group's tokens; None before generation."""
        runs = [run.version for sample in self.samples for run in sample.versions]
        return (min(runs), max(runs)) if runs else None


def checked_limit(value: Any, where: str) -> int:
    """A prompt's own limit of new tokens, which `where` has. Raises ValueError where it is no positive integer."""
    try:
        limit = operator.index(value)
    except TypeError:
        limit = 0
    if limit < 1 or isinstance(value, bool):
        raise ValueError(f"{where}: {OWN_LIMIT} is {value!r:.40}, expected a positive integer")
    return limit


def pack_groups(groups: Sequence[Group]) -> bytes:
    """The groups as msgpack, arrays as raw little-endian bytes. `unpack_groups` is its inverse, bit by bit."""
    packed: bytes = msgpack.packb([WIRE_FORMAT, [_group_out(group) for group in groups]], use_bin_type=True)
    return packed


def unpack_groups(data: bytes) -> list[Group]:
    """Raises ValueError where `data` is not what `pack_groups` writes."""
    try:
        form, rows = msgpack.unpackb(data, raw=False, strict_map_key=False)
        if form != WIRE_FORMAT:
            raise ValueError(f"groups in wire format {form}; this Gyre reads {WIRE_FORMAT}")
        return [_group_in(row) for row in rows]
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"these {len(data)} bytes are not packed groups: {error!r}") from error


def _group_out(group: Group) -> list[Any]:
    return [
        group.id,
        _array_out(group.prompt_ids),
        {key: _value_out(value) for key, value in group.meta.items()},
        [
            [
                _array_out(sample.token_ids),
                _array_out(sample.logprobs),
                [[run.version, run.start, run.end] for run in sample.versions],
                sample.finish_reason,
                None if sample.reward is None else float(sample.reward),
                {key: _value_out(value) for key, value in sample.extras.items()},
            ]
            for sample in group.samples
        ],
    ]


def _group_in(row: list[Any]) -> Group:
    group_id, prompt, meta, samples = row
    return Group(
        id=group_id,
        prompt_ids=_array_in(prompt),
        meta={key: _value_in(value) for key, value in meta.items()},
        samples=[
            Sample(
                token_ids=_array_in(tokens),
                logprobs=_array_in(logprobs),
                versions=tuple(VersionRun(*run) for run in runs),
                finish_reason=finish,
                reward=reward,
                extras={key: _value_in(value) for key, value in extras.items()},
            )
            for tokens, logprobs, runs, finish, reward, extras in samples
        ],
    )


_ARRAY = "__nd__"
_DTYPE = re.compile(r"[<>|][biufcSU]\d+")


def _array_out(array: NDArray[Any]) -> dict[str, Any]:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"an array of dtype {array.dtype} has no wire form; give it a number's or a text's")
    return {_ARRAY: array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def _array_in(value: dict[str, Any]) -> NDArray[Any]:
    if not _DTYPE.fullmatch(value[_ARRAY]):
        raise ValueError(f"an array came with dtype {value[_ARRAY]!r}")
    return np.frombuffer(value["data"], dtype=np.dtype(value[_ARRAY])).reshape(value["shape"]).copy()


def _value_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _array_out(value)
    return value.item() if isinstance(value, np.generic) else value


def _value_in(value: Any) -> Any:
    return _array_in(value) if isinstance(value, dict) and _ARRAY in value else value
