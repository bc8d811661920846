"""The columns of progress reports: one element a sample, checked as arrays.

What a check costs is mostly that of some forty array operations, however few samples a report brings: the reports of
sixty instances, joined, cost about as much as one.

Invariant *one check*: reports are checked by the same operations, one alone or many together. Many are refused
together; which of them is at fault shows when each is checked alone.

This module must not know what the samples are, or what reports bring about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from gyre.engines.replies import LOGPROB_SLACK

COLUMNS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("rows", np.dtype("<u4")),
    ("leases", np.dtype("<u8")),
    ("starts", np.dtype("<u4")),
    ("counts", np.dtype("<u4")),
    ("versions", np.dtype("<i4")),
    ("tokens", np.dtype("<i4")),
    ("logprobs", np.dtype("<f4")),
)
"""Names and types, in the order in which they go over the wire: five with an element a sample, two with one a token."""

_SAMPLE_COLUMNS = 5


class ReportColumns(NamedTuple):
    """What one report, or several one after another, bring. Within a report rows grow strictly."""

    rows: NDArray[np.uint32]
    leases: NDArray[np.uint64]
    starts: NDArray[np.uint32]
    """Tokens that the sample had before."""
    counts: NDArray[np.uint32]
    """Tokens that it got; none is 0."""
    versions: NDArray[np.int32]
    """The policy of these tokens."""
    tokens: NDArray[np.int32]
    """Of all samples, one after another."""
    logprobs: NDArray[np.float32]


class JoinedColumns(NamedTuple):
    columns: ReportColumns
    samples: list[int]
    """How many each report brings."""
    totals: list[int]
    """How many tokens each report brings."""


class ColumnFault(NamedTuple):
    reason: str
    message: str


def join_columns(reports: Sequence[Sequence[bytes]]) -> JoinedColumns | ColumnFault:
    """The columns of reports, each as it came over the wire: of one, or of several that all bring something. A fault
    where one of them is not what it should be."""
    samples: list[int] = []
    totals: list[int] = []
    for report in reports:
        rows, leases, starts, counts, versions, tokens, logprobs = report
        size, total = len(rows), len(tokens)
        if size % 4 or total % 4 or len(leases) != 2 * size or len(logprobs) != total:
            return _size_fault(report)
        if len(starts) != size or len(counts) != size or len(versions) != size:
            return _size_fault(report)
        samples.append(size >> 2)
        totals.append(total >> 2)
    columns = ReportColumns(
        *(
            np.frombuffer(raws[0] if len(raws) == 1 else b"".join(raws), dtype)
            for raws, (_, dtype) in zip(zip(*reports, strict=True), COLUMNS, strict=True)
        )
    )
    fault = _fault_of(columns, samples, totals)
    return fault if fault is not None else JoinedColumns(columns, samples, totals)


def _size_fault(report: Sequence[bytes]) -> ColumnFault:
    for raw, (name, dtype) in zip(report, COLUMNS, strict=True):
        if len(raw) % dtype.itemsize:
            return ColumnFault("invalid", f"progress.{name}: not whole elements of {dtype}")
    lengths = [len(raw) // dtype.itemsize for raw, (_, dtype) in zip(report, COLUMNS, strict=True)]
    if len(set(lengths[:_SAMPLE_COLUMNS])) > 1:
        return ColumnFault("invalid", f"progress: columns of {lengths[:_SAMPLE_COLUMNS]} elements a sample")
    return ColumnFault("lengths", f"progress: {lengths[-2]} token ids with {lengths[-1]} log-probs")


def _fault_of(columns: ReportColumns, samples: list[int], totals: list[int]) -> ColumnFault | None:
    rows, counts = columns.rows, columns.counts
    if not rows.size:
        return ColumnFault("lengths", "progress: tokens of no sample") if any(totals) else None
    ends: NDArray[np.int64] = np.cumsum(samples, dtype=np.int64)
    if (np.add.reduceat(counts, ends - np.array(samples), dtype=np.uint64) != totals).any():
        return ColumnFault("lengths", f"progress: counts add up to another number than {totals} tokens")
    grows = rows[1:] > rows[:-1]
    grows[ends[:-1] - 1] = True  # from one report to the next they need not
    if not grows.all():
        return ColumnFault("invalid", "progress.rows: not strictly increasing")
    if not counts.all():
        return ColumnFault("invalid", "progress.counts: a sample without tokens")
    if int(columns.versions.min()) < 0:
        return ColumnFault("invalid", "progress.versions: a negative version")
    if int(columns.tokens.min()) < 0:
        return ColumnFault("invalid", "progress.tokens: a negative id")
    if not bool(np.isfinite(columns.logprobs).all()):
        return ColumnFault("not_finite", "progress.logprobs: NaN or infinite")
    if float(columns.logprobs.max()) > LOGPROB_SLACK:
        return ColumnFault("invalid", "progress.logprobs: above 0")
    return None


def lineage(prompt: NDArray[np.int32], seed: int, tokens: NDArray[np.int32]) -> str:
    """Names a sample as far as it got: who has the same goes on from the same tokens. xxh3-64 in hexadecimal."""
    digest = xxhash.xxh3_64(seed.to_bytes(8, "little"))
    for ids in (prompt, tokens):
        digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()
