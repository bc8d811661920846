"""How long a job's numbers are kept at which resolution, and what becomes of them.

    each tick (5 s, longer where there are many sources)    for an hour
    each minute                                             for a day
    each quarter of an hour                                 to the end of the job

Invariants:
- *bounded*: of each resolution at most so many rows are kept, and at most so many bytes; only the coarsest grows with
  the length of the job, by 96 rows a day;
- *nothing before its successor*: a row is forgotten only when the coarser row that covers it has been written;
- *made from what there is*: a coarser row is a function of the finer ones of its time, whoever makes it and however
  often.

Pure. This module must not know where rows are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

POINTS = 300
"""Of a number over time, where nobody asks for more or fewer: about as many as a chart has pixels."""

TICK_S = 5
LONGEST_TICK_S = 30
"""A minute still has two ticks to be a mean of."""

SOURCES_PER_TICK_S = 400
"""Sources for which a second of tick is enough: ten thousand vertices are looked at every 25 s."""


@dataclass(frozen=True, slots=True)
class Level:
    """`keep_s` None: to the end of the job."""

    resolution_s: int
    keep_s: float | None
    at_most_bytes: int


TICKS = Level(TICK_S, 3600.0, 64 * 2**20)
MINUTES = Level(60, 86_400.0, 64 * 2**20)
QUARTERS = Level(900, None, 256 * 2**20)
LEVELS = (TICKS, MINUTES, QUARTERS)


def tick_for(sources: int) -> int:
    """Seconds between two moments of a job with so many sources."""
    wanted = math.ceil(sources / SOURCES_PER_TICK_S / TICK_S) * TICK_S
    return min(max(TICK_S, wanted), LONGEST_TICK_S)


def begin_of(at: float, resolution_s: float) -> float:
    """The beginning of the interval that the moment is in."""
    return math.floor(at / resolution_s) * resolution_s


def forget_before(level: Level, *, now: float, size_bytes: int, first: float, last: float) -> float:
    """The time before which rows of this level go: those that are too old and, where there are too many bytes, so much
    of the oldest time as they are over."""
    before = -math.inf if level.keep_s is None else now - level.keep_s
    if size_bytes > level.at_most_bytes:
        over = 1.0 - level.at_most_bytes / size_bytes
        before = max(before, first + (last - first) * over)
    return before


def is_meant(source: str, prefix: str) -> bool:
    """Whether a prefix means the source: `vertex` means all of them, `vertex/rollout-1` that one and no other."""
    return (
        not prefix or source == prefix or source.startswith(prefix if prefix.endswith("/") else f"{prefix}/")
    )
