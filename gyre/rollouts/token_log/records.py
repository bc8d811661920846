"""How the rollout plane's rows look in the store: a request, and a delta (the tokens that a few reports brought).

A delta's columns are raw little-endian bytes, one element a sample; its `ends` are `[key, kind, ...]`, folded in
order after its tokens. `*_in` are the inverses of `*_out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.core.report_batch import ReportBatch
from gyre.rollouts.core.requests import GroupRequest
from gyre.rollouts.protocol.frames import Progress
from gyre.rollouts.samples import Group, pack_groups, unpack_groups

FORMAT = 1


@dataclass(slots=True)
class NewDelta:
    """A delta that is not stored yet: what some reports brought, one after another, and how samples ended."""

    seq: int
    frames: list[Progress | ReportBatch] = field(default_factory=list)
    keys: list[NDArray[np.int64]] = field(default_factory=list)
    """Of each frame's rows."""
    ends: list[list[Any]] = field(default_factory=list)
    rows: int = 0
    sealed: bool = False
    """It holds an end that has to be folded before any further tokens."""


class Delta(NamedTuple):
    """`tokens` int32 and `logprobs` float32 hold the samples' tokens one after another."""

    keys: list[int]
    starts: list[int]
    counts: list[int]
    versions: list[int]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ends: list[list[Any]]


def request_out(request: GroupRequest) -> bytes:
    fields = [
        FORMAT,
        request.purpose,
        pack_groups([request.group]),
        request.n,
        request.sampling,
        request.seed,
        request.min_version,
        request.pinned,
    ]
    return bytes(msgpack.packb(fields))


def request_in(body: bytes) -> tuple[str, Group, int, dict[str, Any], int, int, bool]:
    """Purpose, group, n, sampling, seed, min_version, pinned. Raises ValueError for another format."""
    form, purpose, groups, n, sampling, seed, min_version, pinned = msgpack.unpackb(body)
    if form != FORMAT:
        raise ValueError(f"a stored request of format {form}; this Gyre reads {FORMAT}")
    return purpose, unpack_groups(groups)[0], n, sampling, seed, min_version, pinned


def delta_out(delta: NewDelta) -> bytes:
    """A version that all samples share is stored once; token ids below 65,536 take two bytes."""
    if not delta.frames:
        return bytes(msgpack.packb([FORMAT, b"", b"", b"", 0, b"", 4, b"", delta.ends]))
    frames = delta.frames
    versions = _joined([frame.versions for frame in frames])
    tokens = _joined([frame.tokens for frame in frames])
    uniform = bool((versions == versions[0]).all())
    narrow = int(tokens.max(initial=0)) < 1 << 16
    fields = [
        FORMAT,
        _joined(delta.keys).astype("<i8", copy=False).tobytes(),
        _joined([frame.starts for frame in frames]).astype("<u4", copy=False).tobytes(),
        _joined([frame.counts for frame in frames]).astype("<u4", copy=False).tobytes(),
        int(versions[0]) if uniform else versions.astype("<i4", copy=False).tobytes(),
        tokens.astype("<u2" if narrow else "<i4", copy=False).tobytes(),
        2 if narrow else 4,
        _joined([frame.logprobs for frame in frames]).astype("<f4", copy=False).tobytes(),
        delta.ends,
    ]
    return bytes(msgpack.packb(fields))


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def delta_in(body: bytes) -> Delta:
    """Raises ValueError for another format."""
    form, keys, starts, counts, versions, tokens, width, logprobs, ends = msgpack.unpackb(body)
    if form != FORMAT:
        raise ValueError(f"a stored delta of format {form}; this Gyre reads {FORMAT}")
    key_list = np.frombuffer(keys, "<i8").tolist()
    return Delta(
        key_list,
        np.frombuffer(starts, "<u4").tolist(),
        np.frombuffer(counts, "<u4").tolist(),
        [versions] * len(key_list) if isinstance(versions, int) else np.frombuffer(versions, "<i4").tolist(),
        np.frombuffer(tokens, "<u2" if width == 2 else "<i4").astype(np.int32),
        np.frombuffer(logprobs, "<f4"),
        ends,
    )
