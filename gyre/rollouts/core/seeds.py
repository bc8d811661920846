"""The seeds that samples are generated with.

Invariant *the same again*: a seed depends on the request's seed, the group, the sample's index and how often it was
begun anew, and on nothing that happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.philox import words
from gyre.rollouts.core.requests import GroupRequest, InFlightSample

_STREAM = 32
_MASK = 0x7FFFFFFF


def draw_seeds(requests: Sequence[GroupRequest]) -> None:
    """Draw the seeds of groups that were requested together, in one pass that costs as much as a single seed."""
    if requests:
        ids = np.array([[request.group.id] for request in requests])
        bits = words(requests[0].seed, _STREAM, ids, np.arange(requests[0].n), 0) & np.uint64(_MASK)
        for request, seeds in zip(requests, bits.tolist(), strict=True):
            request.seeds = seeds


def seed_of(sample: InFlightSample) -> int:
    """31 bits."""
    request = sample.request
    if sample.resets:
        return int(words(request.seed, _STREAM, request.group.id, sample.index, sample.resets)) & _MASK
    if not request.seeds:
        draw_seeds([request])
    return request.seeds[sample.index]
