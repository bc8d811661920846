"""Whether master, manager and trainer stay as large as they are: memory, descriptors and sockets of their lives.

A process that is killed begins anew, so a slope is taken within lives only: the median of the slopes between any two
looks at the same life (Theil and Sen's), which a few outliers do not move. A life's first looks are left out, for a
process grows while it loads what it works with. What grows from life to life, because a successor has more to load,
shows in the sizes of young lives: the median slope between any two of them, over the soak's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

YOUNG_S = 120.0
"""A life of this age has loaded what it works with."""

LONG_ENOUGH_S = 240.0
"""Looks at one life that are less than this apart say nothing about an hour."""

MIB_PER_HOUR = 2.0
PER_HOUR = 5.0
"""More of either, and it is not flat. Descriptors and sockets come and go with the instances."""


@dataclass(frozen=True, slots=True)
class Look:
    """A process at a moment: seconds since the soak's start, its own memory in MiB (no shared pages), and counts."""

    at_s: float
    memory_mib: float
    descriptors: int
    sockets: int
    threads: int


@dataclass(slots=True)
class Life:
    role: str
    incarnation: int
    looks: list[Look] = field(default_factory=list)


QUANTITIES = ("memory_mib", "descriptors", "sockets", "threads")


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one quantity in one role."""

    first: float
    last: float
    """Medians of the first and the last tenth of the looks at the longest life."""
    per_hour: float
    observed_s: float
    """Between the first and the last look at the longest life that counts."""


def look_at(process: psutil.Process, at_s: float) -> Look:
    """Raises psutil.Error where it has gone."""
    files = []
    for one in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            files.append(str(one.readlink()))
        except OSError:  # closed meanwhile
            continue
    return Look(
        at_s=round(at_s, 1),
        memory_mib=round(process.memory_full_info().uss / 2**20, 3),
        descriptors=len(files),
        sockets=sum(file.startswith("socket:") for file in files),
        threads=process.num_threads(),
    )


def growth_of(lives: Iterable[Life], quantity: str, *, after_s: float) -> Growth | None:
    """Over looks later than `after_s`; None where no life was looked at for long enough."""
    counted = []
    for life in lives:
        born = life.looks[0].at_s if life.looks else 0.0
        late = [one for one in life.looks if one.at_s >= max(after_s, born + YOUNG_S)]
        if late and late[-1].at_s - late[0].at_s >= LONG_ENOUGH_S:
            counted.append(late)
    if not counted:
        return None
    slopes = np.concatenate(
        [
            _slopes([one.at_s for one in late], [float(getattr(one, quantity)) for one in late])
            for late in counted
        ]
    )
    longest = max(counted, key=lambda late: late[-1].at_s - late[0].at_s)
    values = [float(getattr(one, quantity)) for one in longest]
    tenth = max(len(values) // 10, 1)
    return Growth(
        first=round(float(np.median(values[:tenth])), 2),
        last=round(float(np.median(values[-tenth:])), 2),
        per_hour=round(float(np.median(slopes)) * 3600.0, 2),
        observed_s=round(longest[-1].at_s - longest[0].at_s, 1),
    )


def growth_between_lives(lives: Iterable[Life]) -> float | None:
    """MiB an hour by which a life of `YOUNG_S` is larger than an earlier one of the same age; None for fewer than three
    such lives."""
    young = []
    for life in lives:
        grown = [one for one in life.looks if YOUNG_S / 2 <= one.at_s - life.looks[0].at_s <= YOUNG_S]
        if grown:
            young.append((life.looks[0].at_s, float(np.median([one.memory_mib for one in grown]))))
    if len(young) < 3:
        return None
    slopes = _slopes([at for at, _ in young], [size for _, size in young], apart_s=60.0)
    return round(float(np.median(slopes)) * 3600.0, 2) if len(slopes) else None


def _slopes(at: list[float], values: list[float], *, apart_s: float = LONG_ENOUGH_S / 2) -> np.ndarray:
    """Between any two points that are so far apart: those of neighbours are noise, and there are many of them."""
    x, y = np.asarray(at), np.asarray(values)
    first, second = np.triu_indices(len(x), k=1)
    far = x[second] - x[first] >= apart_s
    first, second = first[far], second[far]
    found: np.ndarray = (y[second] - y[first]) / (x[second] - x[first])
    return found
