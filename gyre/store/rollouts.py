"""The rollout plane's rows: open groups, the token deltas of their samples, and sessions, as packed bytes.

Invariants:
    One-writer     a write carries its writer's term; after `take_over` with a greater one it is Fenced and
                   changes nothing.
    One-commit     the deltas that a write appends, the groups that it opens or closes, the sessions that it
                   changes and the counters that follow from them are one transaction: whoever loads sees sums
                   that agree.

A write survives the death of any process; the last few may be lost in a power cut (SQLite synchronous=NORMAL),
with all later ones and never without them, which costs tokens that are generated again and breaks no promise.
This file must not know what is in a request, a delta or a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from gyre.errors import Fenced
from gyre.store import tables
from gyre.store.database import Database
from gyre.store.prepared import Prepared
from gyre.store.tables import decode_body, encode_body
from gyre.store.terms import raise_term

_CLAIM = Prepared(
    update(tables.rollouts)
    .where(tables.rollouts.c.job_id == bindparam("job"), tables.rollouts.c.term == bindparam("writer"))
    .values(counters=bindparam("new_counters"))
)
_STORED_TERM = select(tables.rollouts.c.term).where(tables.rollouts.c.job_id == bindparam("job"))
_OPEN = Prepared(tables.rollout_groups.insert())
_APPEND = Prepared(tables.rollout_deltas.insert())
_CLOSE = Prepared(
    tables.rollout_groups.delete().where(
        tables.rollout_groups.c.job_id == bindparam("job"),
        tables.rollout_groups.c.request_id == bindparam("gone"),
    )
)
_FORGET = Prepared(
    tables.rollout_deltas.delete().where(
        tables.rollout_deltas.c.job_id == bindparam("job"), tables.rollout_deltas.c.seq == bindparam("gone")
    )
)

_FORGET_SESSION = Prepared(
    tables.rollout_sessions.delete().where(
        tables.rollout_sessions.c.job_id == bindparam("job"),
        tables.rollout_sessions.c.name == bindparam("gone"),
    )
)
_KEEP_SESSION = Prepared(tables.rollout_sessions.insert())


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """What a new writer starts from. `groups` by request id, `deltas` in the order of their writing, `sessions` by
    name."""

    term: int
    counters: dict[str, Any]
    groups: dict[int, bytes]
    deltas: list[tuple[int, bytes]]
    sessions: dict[str, bytes] = field(default_factory=dict)


class RolloutStore:
    """The rollout rows of `job_id`."""

    def __init__(self, database: Database, job_id: str) -> None:
        self.job_id = job_id
        self._database = database

    def take_over(self, *, term: int) -> None:
        """Become the writer. Fenced if a greater term is stored; the same term again is accepted."""
        with self._database.write() as connection:
            stored = raise_term(connection, tables.rollouts, self.job_id, term, counters="{}")
            if stored != term:
                raise self._fenced(term, stored)

    def write(
        self,
        term: int,
        *,
        counters: Mapping[str, Any],
        opened: Mapping[int, bytes] | None = None,
        deltas: Sequence[tuple[int, bytes]] = (),
        closed: Sequence[int] = (),
        forgotten: Sequence[int] = (),
        sessions: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """Open groups, append deltas, then remove closed groups (request ids) and forgotten deltas (numbers), and
        replace the rows of these sessions, None for those that are forgotten, in one transaction. Fenced if another
        term is stored."""
        job = self.job_id
        with self._database.write(relaxed=True, checkpoints_apart=True) as connection:
            self._claim(connection, term, encode_body(dict(counters), "the rollout counters"))
            for statement, rows in (
                (
                    _OPEN,
                    [
                        {"job_id": job, "request_id": key, "request": body}
                        for key, body in (opened or {}).items()
                    ],
                ),
                (_APPEND, [{"job_id": job, "seq": seq, "body": body} for seq, body in deltas]),
                (_CLOSE, [{"job": job, "gone": key} for key in closed]),
                (_FORGET, [{"job": job, "gone": key} for key in forgotten]),
                (_FORGET_SESSION, [{"job": job, "gone": name} for name in sessions or {}]),
                (
                    _KEEP_SESSION,
                    [
                        {"job_id": job, "name": name, "body": body}
                        for name, body in (sessions or {}).items()
                        if body is not None
                    ],
                ),
            ):
                if rows:
                    statement.run(connection, rows)

    def checkpoint(self) -> None:
        """To be called every so often: no write then waits for the disk. Raises StoreError."""
        self._database.checkpoint()

    def load(self) -> RolloutRows:
        """Returns everything that a new writer needs, as of one moment. Empty, at term 0, if nobody has written yet."""
        rollouts, groups, deltas = tables.rollouts, tables.rollout_groups, tables.rollout_deltas
        sessions = tables.rollout_sessions
        with self._database.read() as connection:
            head = connection.execute(
                select(rollouts.c.term, rollouts.c.counters).where(rollouts.c.job_id == self.job_id)
            ).one_or_none()
            group_rows = connection.execute(
                select(groups.c.request_id, groups.c.request)
                .where(groups.c.job_id == self.job_id)
                .order_by(groups.c.request_id)
            ).all()
            delta_rows = connection.execute(
                select(deltas.c.seq, deltas.c.body)
                .where(deltas.c.job_id == self.job_id)
                .order_by(deltas.c.seq)
            ).all()
            session_rows = connection.execute(
                select(sessions.c.name, sessions.c.body).where(sessions.c.job_id == self.job_id)
            ).all()
        return RolloutRows(
            term=head[0] if head else 0,
            counters=decode_body(head[1], "the rollout counters") if head else {},
            groups={request_id: bytes(body) for request_id, body in group_rows},
            deltas=[(seq, bytes(body)) for seq, body in delta_rows],
            sessions={name: bytes(body) for name, body in session_rows},
        )

    def snapshot_rows(self, kind: str) -> dict[str, dict[str, Any]]:
        """The rows of this kind in the job's snapshot, by key: what the master has committed for the rollout plane."""
        snapshot = tables.snapshot
        with self._database.read() as connection:
            found = connection.execute(
                select(snapshot.c.key, snapshot.c.body).where(
                    snapshot.c.job_id == self.job_id, snapshot.c.kind == kind
                )
            ).all()
        return {key: decode_body(body, f"the {kind} {key}") for key, body in found}

    def _claim(self, connection: Connection, term: int, counters: str) -> None:
        """Check the term and set the counters in one statement, which locks the row on PostgreSQL."""
        if _CLAIM.run(connection, [{"job": self.job_id, "writer": term, "new_counters": counters}]) == 1:
            return
        stored = connection.execute(_STORED_TERM, {"job": self.job_id}).scalar_one_or_none()
        raise self._fenced(term, stored)

    def _fenced(self, term: int, stored: int | None) -> Fenced:
        return Fenced(
            f"The rollouts of job {self.job_id} are at term {stored}; this manager has term {term}.",
            hint="Another rollout manager has taken over: stop.",
            details={"stored": stored, "given": term},
        )
