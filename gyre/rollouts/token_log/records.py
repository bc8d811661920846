"""How the rollout plane's rows look in the store: a request, and a delta (the tokens that a few reports brought, and
the leases that were granted meanwhile).

A delta's columns are raw little-endian bytes, one element a sample; its `ends` are `[key, kind, ...]`, folded in
order after its tokens and leases. `*_in` are the inverses of `*_out`.

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
from gyre.rollouts.samples import GroupRequest, pack_groups, unpack_groups

FORMAT = 1


class LeaseRecord(NamedTuple):
    """One lease that was granted."""

    key: int
    """Of the sample."""
    lease: int
    incarnation: str
    """Of the instance that got it."""
    length: int
    """Tokens of the sample that were known when it was granted."""
    instance: str = ""
    """The name of the instance; "" where the lease was stored before names were."""


@dataclass(slots=True)
class PendingDelta:
    """A delta that is not stored yet: what some reports brought, one after another, which leases were granted, and how
    samples ended."""

    seq: int
    reports: list[ReportColumns] = field(default_factory=list)
    keys: list[NDArray[np.int64]] = field(default_factory=list)
    """For each of the reports, the keys of its rows' samples."""
    leases: list[LeaseRecord] = field(default_factory=list)
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
    leases: list[LeaseRecord]


def request_out(request: GroupRequest) -> bytes:
    row = [
        FORMAT,
        request.purpose,
        pack_groups([request.group]),
        request.n,
        request.sampling,
        request.seed,
        request.min_version,
        request.pinned,
        *([request.after] if request.after else []),
    ]
    return bytes(msgpack.packb(row))


def request_in(body: bytes) -> GroupRequest:
    """Raises ValueError for another format."""
    form, purpose, groups, *others = msgpack.unpackb(body)
    if form != FORMAT:
        raise ValueError(f"a stored request of format {form}; this Gyre reads {FORMAT}")
    return GroupRequest(purpose, unpack_groups(groups)[0], *others)


def delta_out(delta: PendingDelta) -> bytes:
    """A version that all samples share is stored once; token ids below 65,536 take two bytes."""
    return bytes(msgpack.packb([FORMAT, *_tokens_out(delta), delta.ends, _leases_out(delta.leases)]))


def _tokens_out(delta: PendingDelta) -> list[Any]:
    reports = delta.reports
    if not reports:
        return [b"", b"", b"", 0, b"", 4, b""]
    versions = _joined([report.versions for report in reports])
    tokens = _joined([report.tokens for report in reports])
    uniform = bool((versions == versions[0]).all())
    narrow = int(tokens.max(initial=0)) < 1 << 16
    return [
        _joined(delta.keys).astype("<i8", copy=False).tobytes(),
        _joined([report.starts for report in reports]).astype("<u4", copy=False).tobytes(),
        _joined([report.counts for report in reports]).astype("<u4", copy=False).tobytes(),
        int(versions[0]) if uniform else versions.astype("<i4", copy=False).tobytes(),
        tokens.astype("<u2" if narrow else "<i4", copy=False).tobytes(),
        2 if narrow else 4,
        _joined([report.logprobs for report in reports]).astype("<f4", copy=False).tobytes(),
    ]


def _leases_out(leases: Sequence[LeaseRecord]) -> list[Any]:
    """An incarnation is stored once, however many leases it got."""
    if not leases:
        return []
    keys, numbers, incarnations, lengths, instances = zip(*leases, strict=True)
    holders = list(zip(incarnations, instances, strict=True))
    places = {holder: at for at, holder in enumerate(dict.fromkeys(holders))}
    return [
        np.array(keys, "<i8").tobytes(),
        np.array(numbers, "<u8").tobytes(),
        [incarnation for incarnation, _ in places],
        np.array([places[holder] for holder in holders], "<u4").tobytes(),
        np.array(lengths, "<u4").tobytes(),
        [instance for _, instance in places],
    ]


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def delta_in(body: bytes) -> StoredDelta:
    """Raises ValueError for another format."""
    form, *fields = msgpack.unpackb(body)
    if form != FORMAT:
        raise ValueError(f"a stored delta of format {form}; this Gyre reads {FORMAT}")
    keys, starts, counts, versions, tokens, width, logprobs, ends, leases = fields
    key_list = np.frombuffer(keys, "<i8").tolist()
    return StoredDelta(
        key_list,
        np.frombuffer(starts, "<u4").tolist(),
        np.frombuffer(counts, "<u4").tolist(),
        [versions] * len(key_list) if isinstance(versions, int) else np.frombuffer(versions, "<i4").tolist(),
        np.frombuffer(tokens, "<u2" if width == 2 else "<i4").astype(np.int32),
        np.frombuffer(logprobs, "<f4"),
        ends,
        _leases_in(*leases) if leases else [],
    )


def _leases_in(
    keys: bytes,
    leases: bytes,
    names: list[str],
    holders: bytes,
    lengths: bytes,
    instances: Sequence[str] = (),
) -> list[LeaseRecord]:
    called = instances or [""] * len(names)
    columns = (np.frombuffer(keys, "<i8"), np.frombuffer(leases, "<u8"), np.frombuffer(holders, "<u4"))
    rows = zip(*(column.tolist() for column in columns), np.frombuffer(lengths, "<u4").tolist(), strict=True)
    return [
        LeaseRecord(key, lease, names[holder], length, called[holder]) for key, lease, holder, length in rows
    ]
