"""Writing a job's numbers: a row a tick, coarser rows of what has passed, and forgetting what is old.

Invariants:
- *stateless*: what is to be made is found in the store, so a recorder of the next master goes on where the last one was
  killed;
- *no row twice*: a tick, a minute and a quarter of an hour have a time of their own, and writing one again replaces it.

A recorder has no loop and no thread. Its caller sees to it that one call runs at a time.
"""

from __future__ import annotations

from itertools import pairwise

from gyre.observe.series.frame import frame_of, mean_of, pack, unpack
from gyre.observe.series.numbers import Numbers
from gyre.observe.series.thinning import LEVELS, MINUTES, TICK_S, TICKS, Level, begin_of, forget_before
from gyre.store import SeriesRow, SeriesStore

MOST_ROWS = 240
"""Finer rows that are made into coarser ones in one go: the rest follows within the next minutes."""


class Recorder:
    def __init__(self, store: SeriesStore) -> None:
        self._store = store
        self._thinned_at = 0.0

    def record(self, numbers: Numbers, *, at: float) -> None:
        """Keep the numbers of this moment (seconds since 1970), and once a minute thin out what is there."""
        begin = begin_of(at, TICK_S)
        self._store.write([SeriesRow(TICKS.resolution_s, begin, pack(frame_of(numbers)))])
        if (minute := begin_of(at, MINUTES.resolution_s)) != self._thinned_at:
            self.thin(now=at)
            self._thinned_at = minute

    def thin(self, *, now: float) -> None:
        """Make the coarser rows of all intervals that are over, then forget what is old."""
        for finer, coarser in pairwise(LEVELS):
            self._make(finer, coarser, now)
        extents = self._store.extents()
        forget = {
            level.resolution_s: before
            for level in LEVELS
            if (extent := extents.get(level.resolution_s)) is not None
            and (
                before := forget_before(
                    level, now=now, size_bytes=extent.size_bytes, first=extent.first, last=extent.last
                )
            )
            > extent.first
        }
        if forget:
            self._store.write([], forget_before=forget)

    def _make(self, finer: Level, coarser: Level, now: float) -> None:
        extents = self._store.extents()
        if (there := extents.get(finer.resolution_s)) is None:
            return
        made = extents.get(coarser.resolution_s)
        begin = made.last + coarser.resolution_s if made else begin_of(there.first, coarser.resolution_s)
        end = begin_of(now, coarser.resolution_s)
        if end <= begin:
            return
        rows = self._store.rows(finer.resolution_s, since=begin, until=end, limit=MOST_ROWS)
        buckets: dict[float, list[bytes]] = {}
        for row in rows:
            buckets.setdefault(begin_of(row.at, coarser.resolution_s), []).append(row.body)
        if len(rows) == MOST_ROWS and len(buckets) > 1:
            buckets.popitem()  # the last one may have more rows
        made_rows = [
            SeriesRow(coarser.resolution_s, at, pack(mean_of([unpack(body) for body in bodies])))
            for at, bodies in buckets.items()
        ]
        if made_rows:
            self._store.write(made_rows)
