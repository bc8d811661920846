"""Keyframes of a job's journal: the folded state after some of its events, so that nobody need fold from the first.

Invariants:
    Only-a-short-cut   a keyframe can be made again from the events at any time: nothing is lost with it, so a write is
                       relaxed.
    Same-from-anybody  whoever makes the keyframe of the same events makes the same one, so a second write changes
                       nothing.

This file must not know what is in a body, or whether it is to be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import select

from gyre.store import tables
from gyre.store.database import Database


class KeyframeRow(NamedTuple):
    """See `gyre.store.tables.keyframes`."""

    seq: int
    after: int
    latest: float
    form: str
    checksum: str
    decisions: str
    chapter: bytes
    body: bytes


class KeyframeMark(NamedTuple):
    """A keyframe without what is large in it."""

    seq: int
    after: int
    latest: float
    form: str
    checksum: str
    decisions: str


class KeyframeStore:
    """The keyframes of `job_id`."""

    def __init__(self, database: Database, job_id: str) -> None:
        self.job_id = job_id
        self._database = database
        self._upsert = database.upsert(tables.keyframes)

    def write(self, rows: Sequence[KeyframeRow]) -> None:
        """Put rows in the place of those of the same events, and drop those of another form, which nobody reads."""
        if not rows:
            return
        table = tables.keyframes
        with self._database.write(relaxed=True) as connection:
            connection.execute(
                table.delete().where(table.c.job_id == self.job_id, table.c.form != rows[0].form)
            )
            connection.execute(self._upsert, [{"job_id": self.job_id, **row._asdict()} for row in rows])

    def before(self, seq: int, form: str) -> KeyframeRow | None:
        """The last keyframe of this form at event `seq` or before it."""
        return self._last(form, tables.keyframes.c.seq <= seq)

    def before_time(self, at: float, form: str) -> int:
        """The number of the last keyframe of this form up to which no event is later than `at`; 0 if there is none."""
        table = tables.keyframes
        with self._database.read() as connection:
            found = connection.execute(
                select(table.c.seq)
                .where(table.c.job_id == self.job_id, table.c.form == form, table.c.latest <= at)
                .order_by(table.c.seq.desc())
                .limit(1)
            ).scalar_one_or_none()
        return int(found or 0)

    def marks(self, form: str) -> list[KeyframeMark]:
        """The keyframes of this form, in order."""
        table = tables.keyframes
        with self._database.read() as connection:
            rows = connection.execute(
                select(*(table.c[name] for name in KeyframeMark._fields))
                .where(table.c.job_id == self.job_id, table.c.form == form)
                .order_by(table.c.seq)
            ).all()
        return [KeyframeMark(*row) for row in rows]

    def chapters(self, form: str, *, after: int, until: int) -> list[tuple[KeyframeMark, bytes]]:
        """The keyframes of this form that tell of events beyond `after` and up to `until`, with their chapters, in
        order."""
        table = tables.keyframes
        with self._database.read() as connection:
            rows = connection.execute(
                select(*(table.c[name] for name in KeyframeMark._fields), table.c.chapter)
                .where(
                    table.c.job_id == self.job_id,
                    table.c.form == form,
                    table.c.seq > after,
                    table.c.after < until,
                )
                .order_by(table.c.seq)
            ).all()
        return [(KeyframeMark(*row[:-1]), row[-1]) for row in rows]

    def _last(self, form: str, which: Any) -> KeyframeRow | None:
        table = tables.keyframes
        with self._database.read() as connection:
            row = connection.execute(
                select(*(table.c[name] for name in KeyframeRow._fields))
                .where(table.c.job_id == self.job_id, table.c.form == form, which)
                .order_by(table.c.seq.desc())
                .limit(1)
            ).one_or_none()
        return None if row is None else KeyframeRow(*row)
