"""What a report says of samples, checked against what is known of them.

Invariant *a former holder harms nobody*: tokens under a lease that is not the sample's are never refused, and never
taken.

This module must not know what a report brings about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.plane.sample_rows import SampleRows
from gyre.rollouts.protocol.columns import ReportColumns
from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.progress import End
from gyre.rollouts.sample_checks import MOST_TOKENS


class Match(NamedTuple):
    """How the rows of a report match the samples; each is an array with an element a row."""

    mine: NDArray[np.bool_]
    """The lease is the sample's, and the reporting instance has it."""
    lengths: NDArray[np.uint32]
    """How many tokens of the sample are known."""


def match(
    columns: ReportColumns,
    rows: SampleRows,
    owners: int | NDArray[np.int64],
    *,
    newest_version: int,
    vocabulary: int = MOST_TOKENS,
) -> Match:
    """`owners` is the number of the reporting instance, or an array with one such number for each row. Raises
    FrameError for what cannot be: a row that was never given out, a gap, a sample longer than its limit, a policy that
    was not published, or a token that is not in the `vocabulary`."""
    numbers, starts = columns.rows, columns.starts
    if int(numbers.max()) >= len(rows):
        raise refuse("unknown_row", f"progress.rows: {int(numbers.max())} is no row of this manager")
    mine = (rows.leases[numbers] == columns.leases) & (rows.owners[numbers] == owners)
    lengths = rows.tokens.lengths[numbers]
    gaps = mine & (starts > lengths)
    if gaps.any():
        at = int(np.flatnonzero(gaps)[0])
        raise refuse(
            "gap",
            f"progress: row {numbers[at]} goes on at token {starts[at]}, but {lengths[at]} are known here",
        )
    ends = starts.astype(np.int64) + columns.counts
    if (mine & (ends > rows.limits[numbers])).any():
        raise refuse("too_long", "progress: a sample is longer than its max_new_tokens")
    newest = int(columns.versions.max())
    if newest > newest_version:
        raise refuse("unknown_version", f"progress.versions: {newest}; the newest policy is {newest_version}")
    highest = int(columns.tokens.max())
    if highest >= vocabulary:
        raise refuse("vocabulary", f"progress.tokens: {highest}; the model has tokens 0 to {vocabulary - 1}")
    return Match(mine, lengths)


def check_ends(ends: Sequence[End], rows: SampleRows, *, newest_version: int) -> None:
    """Raises FrameError for a row that was never given out, or a policy that was not published."""
    if ends and max(end.row for end in ends) >= len(rows):
        raise refuse("unknown_row", "progress.ends: a row that this manager never gave out")
    if any(version > newest_version for end in ends for version, _ in end.runs):
        raise refuse("unknown_version", f"progress.ends: the newest policy is {newest_version}")


def check_versions(
    columns: ReportColumns,
    matched: Match,
    rows: SampleRows,
    served: int | NDArray[np.int64],
    has_loaded: Callable[[int, int], bool],
) -> None:
    """Raises FrameError for tokens of a version that the instance never loaded, or of an older one than the token
    before under the same lease. `served` is what the instance serves, or that of each row's; `has_loaded(index,
    version)` says whether the instance of that element of the columns has loaded the version."""
    for at in np.flatnonzero(matched.mine & (columns.versions != served)).tolist():
        if not has_loaded(at, version := int(columns.versions[at])):
            raise refuse(
                "not_loaded",
                f"progress.versions: tokens of version {version}, which the instance never acknowledged",
            )
    before = rows.tokens.last_versions[columns.rows]
    older = matched.mine & (columns.versions < before) & (columns.starts == matched.lengths)
    for at in np.flatnonzero(older).tolist():
        sample = rows.samples[int(columns.rows[at])]
        if sample is not None and sample.length > sample.length_at_lease:
            raise refuse(
                "older_version",
                f"progress.versions: {int(columns.versions[at])} after tokens of {int(before[at])} in one sample",
            )


def check_runs(ends: Sequence[End], rows: SampleRows, owner: int, has_loaded: Callable[[int], bool]) -> None:
    """Raises FrameError where an end of a sample that the instance `owner` has tells of versions that it never loaded,
    or that go back."""
    for end in ends:
        if not end.runs or rows.owners[end.row] != owner or rows.leases[end.row] != end.lease:
            continue
        before = -1
        for version, _ in end.runs:
            if not has_loaded(version):
                raise refuse(
                    "not_loaded",
                    f"progress.ends: tokens of version {version}, which the instance never acknowledged",
                )
            if version < before:
                raise refuse(
                    "older_version", f"progress.ends: version {version} after {before} in one sample"
                )
            before = version


class Trimmed(NamedTuple):
    columns: ReportColumns | None
    """What is new, of samples that the instance has; None where nothing is."""
    superseded: int
    """Tokens that were left out since they came under another lease."""


def trim(columns: ReportColumns, matched: Match) -> Trimmed:
    """Leave out what a former holder sent, and tokens that are here already (a report that was sent again)."""
    skips = np.minimum(matched.lengths - columns.starts, columns.counts, dtype=np.int64)
    skips[~matched.mine] = columns.counts[~matched.mine]
    superseded = int(columns.counts[~matched.mine].sum())
    kept = np.flatnonzero(skips < columns.counts)
    if not kept.size:
        return Trimmed(None, superseded)
    within = np.arange(len(columns.tokens)) - np.repeat(
        np.cumsum(columns.counts, dtype=np.int64) - columns.counts, columns.counts
    )
    new = within >= np.repeat(skips, columns.counts)
    return Trimmed(
        ReportColumns(
            columns.rows[kept],
            columns.leases[kept],
            (columns.starts[kept] + skips[kept]).astype(np.uint32),
            (columns.counts[kept] - skips[kept]).astype(np.uint32),
            columns.versions[kept],
            columns.tokens[new],
            columns.logprobs[new],
        ),
        superseded,
    )
