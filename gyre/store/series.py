"""The rows of a job's numbers over time, as packed bytes at several resolutions.

Invariants:
    One-row-a-tick   all numbers of a moment are one row, however many sources there are: a job of ten thousand vertices
                     writes as often as a job of two.
    Nothing-to-lose  a write is relaxed: it survives the death of any process, and the last few may be lost in a power
                     cut. Nothing is decided from these rows.

Two masters that overlap write the same moment of the same job; the later one's row stays. This file must not know what
is in a body, or when a row is old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import func, select

from gyre.store import tables
from gyre.store.database import Database


class SeriesRow(NamedTuple):
    """`body` has the numbers of `resolution_s` seconds from `at` on (seconds since 1970)."""

    resolution_s: int
    at: float
    body: bytes


class SeriesExtent(NamedTuple):
    """What there is of one resolution: its first and its last row's time, how many rows, and their bytes."""

    first: float
    last: float
    rows: int
    size_bytes: int


class SeriesStore:
    """The numbers of `job_id` over time."""

    def __init__(self, database: Database, job_id: str) -> None:
        self.job_id = job_id
        self._database = database
        self._upsert = database.upsert(tables.series)

    def write(self, rows: Sequence[SeriesRow], *, forget_before: dict[int, float] | None = None) -> None:
        """Put rows in the place of those of the same resolution and time, and drop what is older than `forget_before`
        says, by resolution; in one transaction."""
        table = tables.series
        with self._database.write(relaxed=True) as connection:
            if rows:
                connection.execute(self._upsert, [{"job_id": self.job_id, **row._asdict()} for row in rows])
            for resolution_s, before in (forget_before or {}).items():
                connection.execute(
                    table.delete().where(
                        table.c.job_id == self.job_id,
                        table.c.resolution_s == resolution_s,
                        table.c.at < before,
                    )
                )

    def rows(
        self, resolution_s: int, *, since: float, until: float, limit: int | None = None
    ) -> list[SeriesRow]:
        """The rows of one resolution that begin at `since` or later and before `until`, in the order of time, at most
        `limit` of them."""
        table = tables.series
        with self._database.read() as connection:
            found = connection.execute(
                select(table.c.resolution_s, table.c.at, table.c.body)
                .where(
                    table.c.job_id == self.job_id,
                    table.c.resolution_s == resolution_s,
                    table.c.at >= since,
                    table.c.at < until,
                )
                .order_by(table.c.at)
                .limit(limit)
            ).all()
        return [SeriesRow(*row) for row in found]

    def extents(self) -> dict[int, SeriesExtent]:
        """What there is, by resolution, the finest first."""
        table = tables.series
        with self._database.read() as connection:
            found = connection.execute(
                select(
                    table.c.resolution_s,
                    func.min(table.c.at),
                    func.max(table.c.at),
                    func.count(),
                    func.sum(func.length(table.c.body)),
                )
                .where(table.c.job_id == self.job_id)
                .group_by(table.c.resolution_s)
                .order_by(table.c.resolution_s)
            ).all()
        return {
            resolution: SeriesExtent(first, last, rows, int(size))
            for resolution, first, last, rows, size in found
        }
