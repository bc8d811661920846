"""Reports of many instances as one set of columns, so that they are checked and taken in by one pass.

What a report costs is mostly that of some forty array operations, however few samples it brings: those of sixty
reports cost about as much as those of one.

Invariant *as if one by one*: `join` gives columns only where each of the reports would have been unfolded without an
error; the checks are `Report.unfold`'s.

This module must not know what the reports bring about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.protocol.frames import Report


@dataclass(slots=True)
class ReportBatch:
    """The columns of `Progress`, those of one report after another. Report `i` has `sizes[i]` samples, at least one,
    and `totals[i]` tokens; within it rows grow strictly."""

    rows: NDArray[np.uint32]
    leases: NDArray[np.uint64]
    starts: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    versions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    sizes: NDArray[np.int64]
    totals: list[int]


def join(reports: Sequence[Report]) -> ReportBatch | None:
    """Of reports that each bring something. None where one of them is not what it should be: `unfold` says which and
    why."""
    sizes, totals = [], []
    for report in reports:
        rows, leases, starts, counts, versions, tokens, logprobs = report.columns
        size, total = len(rows), len(tokens)
        if size % 4 or not size or total % 4 or len(logprobs) != total or len(leases) != 2 * size:
            return None
        if len(starts) != size or len(counts) != size or len(versions) != size:
            return None
        sizes.append(size >> 2)
        totals.append(total >> 2)
    columns = zip(*(report.columns for report in reports), strict=True)
    joined = [column[0] if len(column) == 1 else b"".join(column) for column in columns]
    all_rows, all_counts = np.frombuffer(joined[0], "<u4"), np.frombuffer(joined[3], "<u4")
    all_versions = np.frombuffer(joined[4], "<i4")
    all_tokens, all_logprobs = np.frombuffer(joined[5], "<i4"), np.frombuffer(joined[6], "<f4")
    size_of = np.array(sizes)
    ends = np.cumsum(size_of)
    grows = all_rows[1:] > all_rows[:-1]
    grows[ends[:-1] - 1] = True  # from one report to the next they need not
    if not grows.all() or not all_counts.all():
        return None
    if (np.add.reduceat(all_counts, ends - size_of, dtype=np.uint64) != totals).any():
        return None
    if all_versions.min() < 0 or all_tokens.min() < 0 or not np.isfinite(all_logprobs).all():
        return None
    return ReportBatch(
        all_rows,
        np.frombuffer(joined[1], "<u8"),
        np.frombuffer(joined[2], "<u4"),
        all_counts,
        all_versions,
        all_tokens,
        all_logprobs,
        size_of,
        totals,
    )
