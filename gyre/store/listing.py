"""What a list of jobs is made of: each job's row without its spec, its labels, and what was summed up of its journal.

Invariants:
    Derived           a summary is worth the event it was made after: of a journal that went on, or in another
                      form, it is not given out, and whoever wants one makes it anew. Nothing else is kept in it.
    Labels-are-users  tags and notes are a row of their own, which any process that may write to the store changes,
                      whether the job runs or has ended; no journal has them and no master reads them.

This file must not know what is in a summary, nor which tags are good ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, select

from gyre.errors import NotFound, StoreCorrupt
from gyre.store import tables
from gyre.store.database import Database
from gyre.store.tables import check_text, decode_body, encode_body


@dataclass(frozen=True, slots=True)
class Labels:
    """What users say of a job: `tags` in the order of the alphabet."""

    tags: tuple[str, ...] = ()
    notes: str = ""


NO_LABELS = Labels()


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job as a list needs it. Times in seconds since 1970. `summary` is None where there is none of the last
    event."""

    job_id: str
    name: str
    phase: str
    reason: str
    message: str
    epoch: int
    last_seq: int
    created_at: float
    ended_at: float | None
    url: str | None
    labels: Labels
    summary: dict[str, Any] | None

    @property
    def live(self) -> bool:
        return self.ended_at is None


class JobListing:
    """The list of a store's jobs. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def jobs(self, *, form: int, live: bool | None = None, limit: int | None = None) -> list[ListedJob]:
        """The newest jobs first, with summaries of this form; with `live`, only those that have (False) or have not
        (True) ended."""
        jobs, journals = tables.jobs, tables.journals
        labels, summaries = tables.job_labels, tables.job_summaries
        query = (
            select(
                jobs.c.job_id,
                jobs.c.name,
                jobs.c.phase,
                jobs.c.reason,
                jobs.c.message,
                journals.c.epoch,
                journals.c.last_seq,
                jobs.c.created_at,
                jobs.c.ended_at,
                jobs.c.url,
                labels.c.tags,
                labels.c.notes,
                summaries.c.body,
            )
            .join_from(jobs, journals, journals.c.job_id == jobs.c.job_id)
            .outerjoin(labels, labels.c.job_id == jobs.c.job_id)
            .outerjoin(
                summaries,
                and_(
                    summaries.c.job_id == jobs.c.job_id,
                    summaries.c.seq == journals.c.last_seq,
                    summaries.c.form == form,
                ),
            )
            .order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc())
            .limit(limit)
        )
        if live is not None:
            query = query.where(jobs.c.ended_at.is_(None) if live else jobs.c.ended_at.is_not(None))
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [ListedJob(*row[:10], _labels(row[0], row[10], row[11]), _summary(row[12])) for row in rows]

    def count(self) -> int:
        """How many jobs the store has."""
        with self._database.read() as connection:
            return int(connection.execute(select(func.count()).select_from(tables.jobs)).scalar_one())

    def keep_summary(self, job_id: str, *, seq: int, form: int, body: dict[str, Any]) -> None:
        """Keep what was summed up of the job after event `seq`, instead of what is kept. `seq` is read before what is
        summed up, so that a summary is never said to be newer than it is."""
        row = {"job_id": job_id, "seq": seq, "form": form, "body": encode_body(body, f"summary of {job_id}")}
        with self._database.write(relaxed=True) as connection:  # what a power cut takes is made again
            connection.execute(self._database.upsert(tables.job_summaries), row)

    def labels(self, job_id: str) -> Labels:
        """What users say of the job; nothing of one that is not there."""
        with self._database.read() as connection:
            return _read_labels(connection, job_id)

    def label(
        self, job_id: str, *, add: Iterable[str] = (), remove: Iterable[str] = (), notes: str | None = None
    ) -> Labels:
        """Add tags and remove others; `notes` takes the place of the notes. Returns what then holds. Two who label one
        job at once both succeed. Raises NotFound where there is no such job."""
        add, remove = frozenset(add), frozenset(remove)
        with self._database.write() as connection:
            self._lock(connection, job_id)
            before, table = _read_labels(connection, job_id), tables.job_labels
            after = Labels(
                tuple(sorted((frozenset(before.tags) | add) - remove)),
                before.notes if notes is None else notes,
            )
            connection.execute(delete(table).where(table.c.job_id == job_id))
            self.begin(connection, job_id, after)
        return after

    def begin(self, connection: Connection, job_id: str, labels: Labels) -> None:
        """The labels of a job that has none, in the transaction of `connection`."""
        if labels == NO_LABELS:
            return
        check_text(f"job {job_id}", {"a tag": "".join(labels.tags), "the note": labels.notes})
        tags = encode_body(sorted(labels.tags), f"tags of {job_id}")
        connection.execute(insert(tables.job_labels).values(job_id=job_id, tags=tags, notes=labels.notes))

    def _lock(self, connection: Connection, job_id: str) -> None:
        """Have whoever labels the job next wait for this transaction's end."""
        jobs = tables.jobs
        if (
            connection.execute(
                select(jobs.c.job_id).where(jobs.c.job_id == job_id).with_for_update()
            ).scalar_one_or_none()
            is None
        ):
            raise NotFound(f"There is no job {job_id!r} in {self._database.where}.")


def _read_labels(connection: Connection, job_id: str) -> Labels:
    table = tables.job_labels
    row = connection.execute(select(table.c.tags, table.c.notes).where(table.c.job_id == job_id)).first()
    return NO_LABELS if row is None else _labels(job_id, row[0], row[1])


def _labels(job_id: str, tags: str | None, notes: str | None) -> Labels:
    return (
        Labels(tuple(decode_body(tags, f"tags of {job_id}")), notes or "") if tags is not None else NO_LABELS
    )


def _summary(body: str | None) -> dict[str, Any] | None:
    if body is None:
        return None
    try:
        found = decode_body(body, "a summary")
    except StoreCorrupt:
        return None  # it is made anew from what it was made of
    return found if isinstance(found, dict) else None
