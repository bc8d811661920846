"""Reading a job's numbers: of some sources, between two times, at about so many points.

Invariants:
- *one resolution an answer*: the finest whose rows reach back far enough; its newest part, of which no row of that
  resolution has been made yet, is made of finer ones on the way;
- *bounded*: at most `MOST_VALUES` values are given, whatever is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from gyre.observe.series.frame import Frame, is_share, mean_of, only, unpack
from gyre.observe.series.thinning import (
    LEVELS,
    LONGEST_TICK_S,
    POINTS,
    TICK_S,
    TICKS,
    Level,
    begin_of,
    is_meant,
)
from gyre.store import SeriesExtent, SeriesStore

MOST_POINTS = 2000
MOST_VALUES = 400_000
"""Some ten megabytes of JSON."""


@dataclass(frozen=True, slots=True)
class Series:
    """`series` has, by source and number, pairs of a time (seconds since 1970, the begin of `resolution_s` seconds) and
    a value. `cut` says that there are more sources than were given."""

    resolution_s: float
    series: dict[str, dict[str, list[tuple[float, float]]]]
    cut: bool = False

    def as_dict(self) -> dict[str, object]:
        return {"resolution_s": self.resolution_s, "series": self.series, "cut": self.cut}


def read_series(
    store: SeriesStore,
    *,
    prefix: str = "",
    since: float | None = None,
    until: float | None = None,
    points: int = POINTS,
    names: Collection[str] = (),
) -> Series:
    """The numbers of the sources that `prefix` means (`vertex` all vertices, `vertex/rollout-1` one, "" everything);
    with `names` only those numbers. Without `since` from the first one that is kept."""
    extents = store.extents()
    if not extents:
        return Series(float(TICKS.resolution_s), {})
    first = min(extent.first for extent in extents.values())
    last = max(extent.last + resolution for resolution, extent in extents.items())
    since = first if since is None else max(since, first)
    until = last if until is None else min(until, last)
    if until <= since:
        return Series(float(TICKS.resolution_s), {})
    points = max(1, min(points, MOST_POINTS))
    level = _level_for(extents, since, (until - since) / points)
    resolution = _apart(extents, level)
    width = max(resolution, math.ceil((until - since) / points / resolution) * resolution)
    frames = _frames(store, level, since, until, width, prefix)
    return _series_of(frames, width, frozenset(names))


SPENT = "spent_s/"
"""What the names of the trainer's seconds begin with: by role and activity, since it began."""


def spent_by_role(store: SeriesStore) -> dict[str, dict[str, float]]:
    """How each role had spent its seconds when the trainer was last looked at; empty where nothing is kept of it."""
    numbers = read_series(store, prefix="trainer").series.get("trainer", {})
    told = {name: points[-1] for name, points in numbers.items() if name.startswith(SPENT) and points}
    newest = max((at for at, _ in told.values()), default=0.0)
    found: dict[str, dict[str, float]] = {}
    for name, (at, seconds) in told.items():
        role, _, what = name.removeprefix(SPENT).partition("/")
        if at == newest:  # what is older is of a trainer before the last
            found.setdefault(role, {})[what] = seconds
    return found


def _level_for(extents: dict[int, SeriesExtent], since: float, wanted_s: float) -> Level:
    """Of the levels that reach back to `since` the coarsest that has a row for each point, else the finest."""
    reaching = [level for level in LEVELS if _reaches(extents, level, since)]
    fitting = [level for level in reaching if level.resolution_s <= wanted_s]
    return fitting[-1] if fitting else reaching[0]


def _reaches(extents: dict[int, SeriesExtent], level: Level, since: float) -> bool:
    """Whether this level has rows from `since` on, or at least no coarser one has older rows."""
    if level.resolution_s not in extents:
        return False
    first = extents[level.resolution_s].first
    return first <= since or all(
        extent.first >= begin_of(first, resolution)
        for resolution, extent in extents.items()
        if resolution > level.resolution_s
    )


def _apart(extents: dict[int, SeriesExtent], level: Level) -> float:
    """The time between two rows of the level: ticks are longer where there are many sources."""
    extent = extents[level.resolution_s]
    if level is not TICKS or extent.rows < 2:
        return float(level.resolution_s)
    mean_s = (extent.last - extent.first) / (extent.rows - 1)
    return begin_of(min(mean_s, LONGEST_TICK_S) + TICK_S / 2, TICK_S)


def _frames(
    store: SeriesStore, level: Level, since: float, until: float, width: float, prefix: str
) -> dict[float, Frame]:
    """A frame for each interval of this width in which there are numbers."""
    found: dict[float, list[Frame]] = {}
    begin = begin_of(since, width)
    # From the wanted level on downwards: what it does not have yet is in a finer one.
    for one in reversed(LEVELS[: LEVELS.index(level) + 1]):
        rows = store.rows(one.resolution_s, since=begin, until=until)
        for row in rows:
            frame = unpack(row.body)
            meant = [s for group in frame for s in group.sources if is_meant(s, prefix)]
            found.setdefault(begin_of(row.at, width), []).append(only(frame, meant))
        if rows:
            begin = rows[-1].at + one.resolution_s
    return {at: mean_of(frames) for at, frames in sorted(found.items())}


def _series_of(frames: dict[float, Frame], width: float, names: frozenset[str]) -> Series:
    out: dict[str, dict[str, list[tuple[float, float]]]] = {}
    times: dict[str, list[float]] = {}
    counted, cut = 0, False
    for at, frame in frames.items():
        for group in frame:
            columns = [
                (number, name) for number, name in enumerate(group.names) if not names or name in names
            ]
            for source, row in zip(group.sources, group.values.tolist(), strict=True):
                if source not in out:
                    if counted + len(columns) * len(frames) > MOST_VALUES:
                        cut = True
                        continue
                    counted += len(columns) * len(frames)
                    out[source], times[source] = {}, []
                times[source].append(at)
                mine = out[source]
                for column, name in columns:
                    mine.setdefault(name, []).append((at, row[column]))
    for source, numbers in out.items():
        for name, values in numbers.items():
            if is_share(name) and len(values) < len(times[source]):
                there = dict(values)
                numbers[name] = [(at, there.get(at, 0.0)) for at in times[source]]
    return Series(width, {source: out[source] for source in sorted(out) if out[source]}, cut)
