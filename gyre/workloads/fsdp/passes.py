"""Passes for ranks that must all make the same number of them.

This module must not know about models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gyre.workloads.learner.packing import Pass, paths_of


def rows_of(part: Pass) -> Iterator[Pass]:
    """Each sequence of a pass as a pass of its own, with all of its tokens; padding is dropped. A pass of one sequence
    is given as it is."""
    count = len(part.counts)
    if count == 1 and len(part.lengths) == 1:
        yield part
        return
    trunks = set(part.parents)
    paths = paths_of(part.lengths, part.parents or [-1] * len(part.lengths))
    leaves = [path for at, path in enumerate(paths) if at not in trunks]
    first = 0
    for row in range(count):
        predicted = slice(first, first + part.counts[row])
        path = torch.from_numpy(leaves[row])
        yield Pass(
            tokens=part.tokens[path],
            positions=part.positions[path],
            lengths=[len(path)],
            columns=torch.searchsorted(path, part.columns[predicted]),
            targets=part.targets[predicted],
            rows=torch.zeros_like(part.rows[predicted]),
            values={name: value[predicted] for name, value in part.values.items()},
            tags=part.tags[row : row + 1],
            counts=[part.counts[row]],
        )
        first = predicted.stop


def dummy() -> Pass:
    """What a rank computes while others have a pass and it has none; nobody looks at the result."""
    zero = torch.zeros(1, dtype=torch.int64)
    return Pass(
        tokens=torch.zeros(2, dtype=torch.int64),
        positions=torch.arange(2),
        lengths=[2],
        columns=zero,
        targets=zero,
        rows=zero,
        values={},
        tags=[None],
        counts=[1],
    )
