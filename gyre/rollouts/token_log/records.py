"""How the rollout plane's rows look in the store: a request, and a delta (the tokens that a few reports brought).

A delta's columns are raw little-endian bytes, one element a sample; its `ends` are `[key, kind, ...]`, folded in
order after its tokens. `*_in` are the inverses of `*_out`.

This module must not know what a request or a delta brings about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.protocol.columns import ReportColumns
from gyre.rollouts.samples import Group, pack_groups, unpack_groups

FORMAT = 1


class RequestRecord(NamedTuple):
    """One group that was requested."""

    purpose: str
    group: Group
    n: int
    sampling: dict[str, Any]
    seed: int
    min_version: int
    pinned: bool


@dataclass(slots=True)
class PendingDelta:
    """A delta that is not stored yet: what some reports brought, one after another, and how samples ended."""

    seq: int
    reports: list[ReportColumns] = field(default_factory=list)
    keys: list[NDArray[np.int64]] = field(default_factory=list)
    """For each of the reports, the keys of its rows' samples."""
    ends: list[list[Any]] = field(default_factory=list)
    rows: int = 0
    sealed: bool = False
    """It holds an end that has to be folded before any further tokens."""


class StoredDelta(NamedTuple):
    """`tokens` int32 and `logprobs` float32 hold the samples' tokens one after another."""

    keys: list[int]
    starts: list[int]
    counts: list[int]
    versions: list[int]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ends: list[list[Any]]


def request_out(request: RequestRecord) -> bytes:
    purpose, group, *others = request
    return bytes(msgpack.packb([FORMAT, purpose, pack_groups([group]), *others]))


def request_in(body: bytes) -> RequestRecord:
    """Raises ValueError for another format."""
    form, purpose, groups, *others = msgpack.unpackb(body)
    if form != FORMAT:
        raise ValueError(f"a stored request of format {form}; this Gyre reads {FORMAT}")
    return RequestRecord(purpose, unpack_groups(groups)[0], *others)


def delta_out(delta: PendingDelta) -> bytes:
    """A version that all samples share is stored once; token ids below 65,536 take two bytes."""
    if not delta.reports:
        return bytes(msgpack.packb([FORMAT, b"", b"", b"", 0, b"", 4, b"", delta.ends]))
    reports = delta.reports
    versions = _joined([report.versions for report in reports])
    tokens = _joined([report.tokens for report in reports])
    uniform = bool((versions == versions[0]).all())
    narrow = int(tokens.max(initial=0)) < 1 << 16
    fields = [
        FORMAT,
        _joined(delta.keys).astype("<i8", copy=False).tobytes(),
        _joined([report.starts for report in reports]).astype("<u4", copy=False).tobytes(),
        _joined([report.counts for report in reports]).astype("<u4", copy=False).tobytes(),
        int(versions[0]) if uniform else versions.astype("<i4", copy=False).tobytes(),
        tokens.astype("<u2" if narrow else "<i4", copy=False).tobytes(),
        2 if narrow else 4,
        _joined([report.logprobs for report in reports]).astype("<f4", copy=False).tobytes(),
        delta.ends,
    ]
    return bytes(msgpack.packb(fields))


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def delta_in(body: bytes) -> StoredDelta:
    """Raises ValueError for another format."""
    form, keys, starts, counts, versions, tokens, width, logprobs, ends = msgpack.unpackb(body)
    if form != FORMAT:
        raise ValueError(f"a stored delta of format {form}; this Gyre reads {FORMAT}")
    key_list = np.frombuffer(keys, "<i8").tolist()
    return StoredDelta(
        key_list,
        np.frombuffer(starts, "<u4").tolist(),
        np.frombuffer(counts, "<u4").tolist(),
        [versions] * len(key_list) if isinstance(versions, int) else np.frombuffer(versions, "<i4").tolist(),
        np.frombuffer(tokens, "<u2" if width == 2 else "<i4").astype(np.int32),
        np.frombuffer(logprobs, "<f4"),
        ends,
    )
