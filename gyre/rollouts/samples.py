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
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

WIRE_FORMAT = 1

OWN_LIMIT = "max_new_tokens"
"""The key of a group's `meta` that limits its samples' length, in tokens."""

MORE = "reward."
"""Before the name of each further number that a reward function returned, in a sample's `extras`."""

OLD_LOGPROBS = "old_logprobs"
"""The key in a sample's `extras` of the trainer's own log-probs before the first update of the step, float32 `[t]`."""


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

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, with one array for all samples where there was one for each: small arrays take longer to pickle
        than what is in them."""
        return _with_samples, (self.id, self.prompt_ids, self.meta, _columns(self.samples))

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


def _columns(samples: Sequence[Sample]) -> tuple[Any, ...]:
    """What the samples have, field by field: the arguments of `_with_samples` after a group's own."""
    extras: Any = [sample.extras for sample in samples]
    if extras and all(list(one) == list(extras[0]) for one in extras):
        extras = {key: _joined([one[key] for one in extras]) for key in extras[0]}
    return (
        _joined([sample.token_ids for sample in samples]),
        _joined([sample.logprobs for sample in samples]),
        [tuple((run.version, run.start, run.end) for run in sample.versions) for sample in samples],
        [sample.finish_reason for sample in samples],
        [sample.reward for sample in samples],
        extras,
    )


def _with_samples(
    group_id: int, prompt_ids: NDArray[np.int32], meta: dict[str, Any], columns: tuple[Any, ...]
) -> Group:
    tokens, logprobs, versions, finish_reasons, rewards, extras = columns
    if isinstance(extras, dict):
        parts = {key: _parted(joined) for key, joined in extras.items()}
        extras = [{key: values[at] for key, values in parts.items()} for at in range(len(versions))]
    rows = zip(
        _parted(tokens),
        _parted(logprobs),
        versions,
        finish_reasons,
        rewards,
        extras,
        strict=True,
    )
    samples = [
        Sample(one, theirs, tuple(VersionRun(*run) for run in runs), *others)
        for one, theirs, runs, *others in rows
    ]
    return Group(group_id, prompt_ids, meta, samples)


def _joined(values: list[Any]) -> list[Any] | tuple[NDArray[Any], list[int]]:
    """Vectors of one dtype as one, with their lengths; anything else as it is. `_parted` is its inverse."""
    if not all(
        isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.isnative for value in values
    ):
        return values
    if len({value.dtype for value in values}) != 1:
        return values
    return np.concatenate(values), [len(value) for value in values]


def _parted(joined: list[Any] | tuple[NDArray[Any], list[int]]) -> list[Any]:
    """The values one by one; vectors that were joined are views of one array."""
    if isinstance(joined, list):
        return joined
    array, lengths = joined
    ends = list(accumulate(lengths))
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]


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
    name = array.dtype.str
    if not _DTYPE.fullmatch(name):
        raise TypeError(f"an array of dtype {array.dtype} has no wire form; give it a number's or a text's")
    return {_ARRAY: name, "shape": array.shape, "data": array.tobytes()}


def _array_in(value: dict[str, Any]) -> NDArray[Any]:
    data = value["data"]
    if type(data) is not bytes:  # of a number `bytearray` would make as many bytes
        raise TypeError(f"an array's data came as {type(data).__name__}")
    array: NDArray[Any] = np.frombuffer(bytearray(data), dtype=_dtype_of(value[_ARRAY]))
    return array if [len(array)] == value["shape"] else array.reshape(value["shape"])


@lru_cache(maxsize=64)
def _dtype_of(name: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"an array came with dtype {name!r}")
    return np.dtype(name)


def _value_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _array_out(value)
    return value.item() if isinstance(value, np.generic) else value


def _value_in(value: Any) -> Any:
    return _array_in(value) if isinstance(value, dict) and _ARRAY in value else value
