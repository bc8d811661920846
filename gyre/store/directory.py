"""The store: the directory of jobs (what `gyre ls` lists), and the way to each job's journal and ledger.

Invariants:
    One-live-name     a job is live until its `ended_at` is set, whatever its phase is called; of live jobs
                      no two bear one name, and the database says so (a unique partial index), not a check.
    One-epoch         a job's epoch and last number are read from its journal, never kept twice.
    Born-whole        a job and its (empty) journal are created in one transaction.

This file must not know which phases there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from sqlalchemy import Connection, Row, Select, and_, insert, or_, select, text, update

from gyre.errors import Conflict, Fenced, NotFound, StoreCorrupt, StoreError, nearest
from gyre.store import tables
from gyre.store.database import BUSY_TIMEOUT_S, Database, is_unique_violation, open_database
from gyre.store.journal import Journal
from gyre.store.keyframes import KeyframeStore
from gyre.store.ledger import LedgerStore
from gyre.store.listing import NO_LABELS, JobListing, Labels
from gyre.store.presence import Finding, Lost, StoreMark
from gyre.store.rollouts import RolloutStore
from gyre.store.series import SeriesStore
from gyre.store.tables import check_text, decode_body, encode_body

FIRST_PHASE = "submitted"


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job of the directory. Times in seconds since 1970; `live` until `ended_at` is set."""

    job_id: str
    name: str
    phase: str
    reason: str
    message: str
    epoch: int
    last_seq: int
    spec: dict[str, Any]
    created_at: float
    ended_at: float | None
    ray_address: str | None
    namespace: str | None
    master_pid: int | None
    url: str | None
    token_hint: str | None
    queued_since: float | None
    queued_at: float | None
    """When the job last said that it is queued."""

    @property
    def live(self) -> bool:
        return self.ended_at is None


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits for room that other jobs hold, since `since` (seconds since 1970)."""

    job_id: str
    name: str
    since: float


class JobFields(TypedDict, total=False):
    """The fields that `update_job` can change."""

    phase: str
    reason: str
    message: str
    spec: dict[str, Any]
    ended_at: float | None
    ray_address: str | None
    namespace: str | None
    master_pid: int | None
    url: str | None
    token_hint: str | None
    queued_since: float | None
    queued_at: float | None
    epoch: int


QUEUED_FOR_S = 60.0
"""How long a job counts as queued after it said so: one whose master has died holds nobody up for longer."""


class Store:
    """An open store; safe to use from many threads, closed by `close` or by leaving `with`."""

    def __init__(self, database: Database, url: str) -> None:
        self.url = url
        self._database = database

    def close(self) -> None:
        """Let go of every connection. On SQLite the last process to do so folds the log into the file."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self._database.where})"

    def look(self) -> Finding | None:
        """What is wrong with an SQLite file, found within a deadline; None where it is as it was opened. A removed log
        is made good. PostgreSQL is asked nothing: its own errors tell."""
        presence = self._database.presence
        finding = presence.look_within() if presence is not None else None
        if presence is None or finding is None or finding.kind in (Lost.HANGING, Lost.MISSING, Lost.REPLACED):
            return finding
        mending_s = (
            BUSY_TIMEOUT_S + presence.hangs_after_s
        )  # SQLite waits for its lock, and then for the disk
        return presence.look_within(self._database.lost, deadline_s=mending_s)

    @property
    def mark(self) -> StoreMark | None:
        """Which store it is, and its last commit of this process that a loss of power does not undo. None for
        PostgreSQL, and before there is one."""
        presence = self._database.presence
        return presence.mark if presence is not None else None

    def check_mark(self, mark: StoreMark) -> None:
        """Raises StoreLost where this is an older copy of the store that an earlier process left so, or another."""
        presence = self._database.presence
        if presence is None:
            return
        with self._database.read():  # which tells the presence what the file is
            pass
        if (finding := presence.short_of(mark)) is not None:
            raise finding.error()

    def journal(self, job_id: str) -> Journal:
        """The journal of one job. Reading or writing one that does not exist raises NotFound."""
        return Journal(self._database, job_id)

    def ledger(self, job_id: str) -> LedgerStore:
        """The sample ledger of one job, which begins with its first `take_over`."""
        return LedgerStore(self._database, job_id)

    def rollouts(self, job_id: str) -> RolloutStore:
        """The rollout rows of one job, which begin with their first `take_over`."""
        return RolloutStore(self._database, job_id)

    def series(self, job_id: str) -> SeriesStore:
        """The numbers of one job over time; none for a job that is not there."""
        return SeriesStore(self._database, job_id)

    def keyframes(self, job_id: str) -> KeyframeStore:
        """The keyframes of one job's journal; none for a job that is not there."""
        return KeyframeStore(self._database, job_id)

    @property
    def listing(self) -> JobListing:
        """The list of the jobs: what users say of each, and what was summed up of its journal."""
        return JobListing(self._database)

    def verify(self) -> None:
        """Read everything and check its structure (SQLite; seconds per gigabyte). StoreCorrupt if damaged:
        opening reads only the first pages, so damage elsewhere shows when it is touched, or here."""
        if not self._database.is_sqlite:
            return
        with self._database.read() as connection:
            found = connection.execute(text("PRAGMA integrity_check(5)")).scalars().all()
        if found != ["ok"]:
            raise StoreCorrupt(
                f"{self._database.path} is damaged: {'; '.join(map(str, found))}.",
                hint="Restore it from a copy, or move it aside and start with a new one.",
            )

    # -- directory -----------------------------------------------------------------------------------------

    def create_job(
        self,
        *,
        job_id: str,
        name: str,
        spec: dict[str, Any],
        now: float,
        ray_address: str | None = None,
        namespace: str | None = None,
        phase: str = FIRST_PHASE,
        labels: Labels = NO_LABELS,
    ) -> None:
        """Add a live job with an empty journal at epoch 0. Conflict if a live job bears the name."""
        check_text(f"job {job_id}", {"job_id": job_id, "name": name, "phase": phase})
        row = {
            "job_id": job_id,
            "name": name,
            "phase": phase,
            "reason": "",
            "message": "",
            "spec": encode_body(spec, f"job {name}"),
            "created_at": now,
            "ray_address": ray_address,
            "namespace": namespace,
        }
        try:
            with self._database.write() as connection:
                connection.execute(insert(tables.jobs).values(row))
                connection.execute(
                    insert(tables.journals).values(job_id=job_id, epoch=0, last_seq=0, taken_at=None)
                )
                self.listing.begin(connection, job_id, labels)
        except StoreError as error:
            if is_unique_violation(error):
                raise self._conflict(job_id, name) from error
            raise

    def update_job(self, job_id: str, **fields: Unpack[JobFields]) -> None:
        """Change some fields of a job. Setting `ended_at` ends it and frees its name.

        `epoch` is not stored: it is who is asking. Given, the change is Fenced unless that epoch is still
        the journal's, so that a replaced master cannot write over its successor.
        """
        known = JobFields.__annotations__
        for field in fields:
            if field not in known:
                raise StoreError(f"A job has no field {field!r}.", hint=nearest(field, known))
        values: dict[str, Any] = dict(fields)
        epoch = values.pop("epoch", None)
        if "spec" in values:
            values["spec"] = encode_body(values["spec"], f"job {job_id}")
        check_text(f"job {job_id}", {key: value for key, value in values.items() if isinstance(value, str)})
        try:
            with self._database.write() as connection:
                self._check_epoch(connection, job_id, epoch)
                if values:
                    connection.execute(
                        update(tables.jobs).where(tables.jobs.c.job_id == job_id).values(**values)
                    )
        except StoreError as error:
            if is_unique_violation(error):  # `ended_at=None` of a job whose name was given away since
                raise self._conflict(job_id, self.job(job_id).name) from error
            raise

    def job(self, name_or_id: str) -> JobRow:
        """The job of that id, or else the newest of that name. NotFound names the nearest known name."""
        jobs = tables.jobs
        with self._database.read() as connection:
            rows = connection.execute(
                _select_jobs()
                .where(or_(jobs.c.job_id == name_or_id, jobs.c.name == name_or_id))
                .order_by(
                    (jobs.c.job_id == name_or_id).desc(), jobs.c.created_at.desc(), jobs.c.job_id.desc()
                )
                .limit(1)
            ).all()
            if rows:
                return _job_row(rows[0])
            names = connection.execute(select(jobs.c.name).distinct().limit(1000)).scalars().all()
        raise NotFound(
            f"There is no job {name_or_id!r} in {self._database.where}.",
            hint=nearest(name_or_id, names) or "The store holds no job yet.",
        )

    def jobs(self, *, live: bool | None = None, limit: int = 100) -> list[JobRow]:
        """The newest jobs first; with `live`, only those that have (False) or have not (True) ended."""
        jobs = tables.jobs
        query = _select_jobs().order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(limit)
        if live is not None:
            query = query.where(jobs.c.ended_at.is_(None) if live else jobs.c.ended_at.is_not(None))
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [_job_row(row) for row in rows]

    def queue(self, ray_address: str | None, now: float) -> list[QueuedJob]:
        """The live jobs of that Ray cluster that wait for room that others hold, the longest waiting first. Where no
        address is known, as of a cluster within one process, all jobs are of one cluster."""
        jobs = tables.jobs
        query = (
            select(jobs.c.job_id, jobs.c.name, jobs.c.queued_since)
            .where(jobs.c.ended_at.is_(None), jobs.c.queued_since.is_not(None))
            .where(jobs.c.queued_at > now - QUEUED_FOR_S)
            .order_by(jobs.c.queued_since, jobs.c.job_id)
        )
        if ray_address is not None:
            query = query.where(jobs.c.ray_address == ray_address)
        with self._database.read() as connection:
            return [QueuedJob(*row) for row in connection.execute(query)]

    def _check_epoch(self, connection: Connection, job_id: str, epoch: int | None) -> None:
        journals = tables.journals
        stored = connection.execute(
            select(journals.c.epoch).where(journals.c.job_id == job_id).with_for_update()
        ).scalar_one_or_none()
        if stored is None:
            raise NotFound(f"There is no job {job_id!r} in {self._database.where}.")
        if epoch is not None and stored != epoch:
            raise Fenced(
                f"Job {job_id} is at epoch {stored}; this writer has epoch {epoch}.",
                hint="Another master has taken the job over: stop.",
                details={"stored": stored, "given": epoch},
            )

    def _conflict(self, job_id: str, name: str) -> Conflict:
        jobs = tables.jobs
        with self._database.read() as connection:
            holder = connection.execute(
                select(jobs.c.job_id, jobs.c.phase).where(jobs.c.name == name, jobs.c.ended_at.is_(None))
            ).first()
        if holder is None or holder[0] == job_id:
            return Conflict(
                f"There is a job of id {job_id!r} already.",
                hint="Job ids are never used twice.",
                details={"job_id": job_id},
            )
        return Conflict(
            f"The name {name!r} is taken by job {holder[0]}, which is {holder[1]}.",
            hint=f"Stop it (gyre stop {name}), or choose another name.",
            details={"job_id": holder[0], "phase": holder[1]},
        )


def open_store(url: str, *, create: bool = True, read_only: bool = False, hold_s: float = 0.0) -> Store:
    """Open the store at `url`, create it if it is not there (and `create`), and bring its schema up to date.

    `sqlite:////absolute/path.db` or `postgresql+psycopg://user:password@host/database`. Any number of
    processes may open one store at the same moment. `read_only` neither creates nor migrates. A transaction waits up to
    `hold_s` for an SQLite file that was moved away.

    Raises:
        SchemaTooNew: a newer Gyre wrote it.
        StoreCorrupt: the file is not a database, or is damaged; it is left as it is.
        StoreFull:    no space.
        StoreLost:    it is not there (and not `create`); by any transaction: it is not there any more, or is another.
        StoreError:   the path cannot be written, the server cannot be reached, the address makes no sense.
    """
    return Store(open_database(url, create=create, read_only=read_only, hold_s=hold_s), url)


def _select_jobs() -> Select[Any]:
    jobs, journals = tables.jobs, tables.journals
    return select(
        jobs.c.job_id,
        jobs.c.name,
        jobs.c.phase,
        jobs.c.reason,
        jobs.c.message,
        journals.c.epoch,
        journals.c.last_seq,
        jobs.c.spec,
        jobs.c.created_at,
        jobs.c.ended_at,
        jobs.c.ray_address,
        jobs.c.namespace,
        jobs.c.master_pid,
        jobs.c.url,
        jobs.c.token_hint,
        jobs.c.queued_since,
        jobs.c.queued_at,
    ).join_from(jobs, journals, and_(journals.c.job_id == jobs.c.job_id))


def _job_row(row: Row[Any]) -> JobRow:
    values = dict(row._mapping)
    values["spec"] = decode_body(values["spec"], f"job {values['job_id']}")
    return JobRow(**values)
