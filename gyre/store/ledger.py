"""The sample ledger: the status of every group of samples, the step and micro-batch that trained it, and what a
checkpoint covers.

Invariants:
    One-writer            a write carries its writer's term; after `take_over` with a greater one it is
                          Fenced and changes nothing.
    Covered-by-checkpoint a group is covered when it is `trained` at a step not after the newest stored
                          checkpoint. Only a covered group loses its payload; what is not covered is loaded.
    Durable-when-trained  a write that says `trained`, stores a checkpoint or the last micro-batch of a step,
                          drops payloads or changes the writer is durable on return. Any other may be lost in
                          a power cut, with all later ones and never without them: then a few groups are
                          generated or delivered again, which costs work and breaks no promise, whereas a lost
                          `trained` under a restored newer checkpoint would train a group twice. So the
                          frequent small writes do not wait for the disk (SQLite synchronous=NORMAL,
                          PostgreSQL synchronous_commit=off). The death of any process, short of the
                          machine's, loses nothing either way.

This file must not know what is in a payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    bindparam,
    delete,
    func,
    literal_column,
    select,
    text,
    update,
)

from gyre.errors import Fenced, StoreError
from gyre.store import tables
from gyre.store.database import Database
from gyre.store.tables import check_text, decode_body, encode_body
from gyre.store.terms import raise_term

STATUSES = ("queued", "done", "trained", "dropped")


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of samples. A `payload` (its prompt, later its samples) or version bound of None leaves what
    is stored; a `step` of None takes the group out of its step."""

    group_id: int
    status: str
    step: int | None = None
    version_min: int | None = None
    version_max: int | None = None
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step and the groups that it trained; `digest` is that of the weights after it."""

    step: int
    version: int | None
    digest: str | None
    group_ids: list[int]
    metrics: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint that is complete on disk: it covers every step up to and including `step`."""

    step: int
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class MicroBatchRow:
    """What a micro-batch is made of: the ids of each rank's groups. `last` says that it completes its step."""

    step: int
    position: int
    shares: list[list[int]]
    last: bool


@dataclass(frozen=True, slots=True)
class DiscardRow:
    """Samples that were not trained on. With `replaced_by` that group took the place of this one, which is `dropped`;
    without, this group is generated again. `number` counts a ledger's discards from 1."""

    number: int
    group_id: int
    reason: str
    tokens: int
    at: float
    replaced_by: int | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class RestoreRow:
    """A restore of a role's ranks from `source`. `gang` is the incarnation of the first rank; `number` counts a
    ledger's restores from 1. A `step` of None means that the restore has begun and its end is not known; `seconds` is
    None if the trainer that began it died before its end."""

    number: int
    role: str
    gang: int
    source: str
    checkpoint_step: int
    step: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PassesRow:
    """From `from_step` on the passes of a role are made smaller `halved` times, because of `error`; of several rows
    that hold for a step the last counts. `size` is what the ranks said of it, empty until they did. `number` counts a
    ledger's rows from 1."""

    number: int
    role: str
    from_step: int
    halved: int
    size: dict[str, int]
    error: str


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """The rows that a new writer starts from: `groups` that no checkpoint covers, by id, with their payloads, and
    `micro_batches` of steps that none covers. `replaced` maps each replaced group to the group in its place, and
    `restores` and `passes` are by number."""

    term: int
    cursor: int
    groups: list[GroupRow]
    steps: list[StepRow]
    checkpoints: list[CheckpointRow]
    micro_batches: list[MicroBatchRow] = field(default_factory=list)
    discards: int = 0
    replaced: dict[int, int] = field(default_factory=dict)
    restores: list[RestoreRow] = field(default_factory=list)
    passes: list[PassesRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LedgerAudit:
    """Result of auditing a ledger in SQL, independently of the code that wrote it.

    `duplicates` maps a group to the steps that list it, if it is listed more than once; `gaps` are the
    inclusive ranges of group ids from 0 up to the cursor that have no row; `unlisted` counts groups that
    are `trained` at a step which is stored but does not list them. `discarded` counts tokens by reason.
    """

    counts: dict[str, int]
    duplicates: dict[int, list[int]]
    gaps: list[tuple[int, int]]
    unlisted: int
    cursor: int
    discarded: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not self.duplicates and not self.gaps and not self.unlisted


class LedgerStore:
    """The sample ledger of `job_id`."""

    def __init__(self, database: Database, job_id: str) -> None:
        self.job_id = job_id
        self._database = database
        self._upsert_groups = database.upsert(
            tables.ledger_groups, keep_if_null=("payload", "version_min", "version_max")
        )
        self._upsert_steps = database.upsert(tables.ledger_steps)
        self._upsert_checkpoint = database.upsert(tables.ledger_checkpoints)
        self._upsert_micro_batches = database.upsert(tables.ledger_micro_batches)
        self._upsert_discards = database.upsert(tables.ledger_discards)
        self._upsert_restore = database.upsert(tables.ledger_restores)
        self._upsert_passes = database.upsert(tables.ledger_passes)

    # -- writing -------------------------------------------------------------------------------------------

    def take_over(self, *, term: int) -> None:
        """Become the writer. Fenced if a greater term is stored. The same term is accepted again, because the starter
        of writers assigns terms (the master's epoch and a count)."""
        with self._database.write() as connection:
            stored = raise_term(connection, tables.ledgers, self.job_id, term, cursor=0)
            if stored != term:
                raise self._fenced(term, stored)

    def hold_data(self, term: int, data: str) -> str:
        """Note which data the prompts are drawn from, where that is not known yet. Returns what is noted. Raises
        Fenced."""
        with self._database.write() as connection:
            self._claim(connection, term, None)
            row = tables.ledgers.c.job_id == self.job_id
            stored = connection.execute(select(tables.ledgers.c.data).where(row)).scalar_one()
            if stored is not None:
                return str(stored)
            connection.execute(update(tables.ledgers).where(row).values(data=data))
        return data

    def write(
        self,
        term: int,
        *,
        groups: Sequence[GroupRow] = (),
        steps: Sequence[StepRow] = (),
        checkpoint: CheckpointRow | None = None,
        micro_batches: Sequence[MicroBatchRow] = (),
        discards: Sequence[DiscardRow] = (),
        restore: RestoreRow | None = None,
        passes: PassesRow | None = None,
        cursor: int | None = None,
        drop_payloads_through_step: int | None = None,
        forget_digests_from_step: int | None = None,
        digests: Mapping[int, str] | None = None,
        forget_micro_batches_of_step: int | None = None,
    ) -> None:
        """Upsert everything in one transaction. Fenced if another term is stored.

        `cursor` is the next group id to be drawn from the data. `drop_payloads_through_step` forgets the
        payloads of groups trained up to that step, and never of one that no checkpoint covers.
        `forget_digests_from_step` removes the digests of that step and later ones: the trainer went on from it with
        other weights than the recorded ones. `digests` are of steps that are stored, by step.
        `forget_micro_batches_of_step` removes those of a step that is not trained: it is assembled anew.
        """
        group_rows, step_rows = self._group_rows(groups), self._step_rows(steps)
        rare = (
            checkpoint,
            drop_payloads_through_step,
            forget_digests_from_step,
            forget_micro_batches_of_step,
        )
        durable = (
            any(one is not None for one in rare)
            or bool(digests)
            or any(group.status == "trained" for group in groups)
            or any(batch.last for batch in micro_batches)
        )
        with self._database.write(relaxed=not durable) as connection:
            self._claim(connection, term, cursor)
            self._forget(connection, forget_digests_from_step, forget_micro_batches_of_step)
            if group_rows:
                connection.execute(self._upsert_groups, group_rows)
            if step_rows:
                connection.execute(self._upsert_steps, step_rows)
            self._set_digests(connection, digests or {})
            self._note(connection, micro_batches, discards, restore, passes, checkpoint)
            if drop_payloads_through_step is not None:
                self._drop_payloads(connection, drop_payloads_through_step)

    def _note(
        self,
        connection: Connection,
        micro_batches: Sequence[MicroBatchRow],
        discards: Sequence[DiscardRow],
        restore: RestoreRow | None,
        passes: PassesRow | None,
        checkpoint: CheckpointRow | None,
    ) -> None:
        if micro_batches:
            connection.execute(self._upsert_micro_batches, self._micro_batch_rows(micro_batches))
        if discards:
            connection.execute(self._upsert_discards, self._discard_rows(discards))
        if restore is not None:
            connection.execute(self._upsert_restore, [{"job_id": self.job_id, **asdict(restore)}])
        if passes is not None:
            connection.execute(self._upsert_passes, [self._passes_row(passes)])
        if checkpoint is not None:
            check_text(f"checkpoint {checkpoint.step}", {"path": checkpoint.path})
            connection.execute(self._upsert_checkpoint, [{"job_id": self.job_id, **asdict(checkpoint)}])

    def _forget(
        self, connection: Connection, digests_from_step: int | None, micro_batches_of_step: int | None
    ) -> None:
        if digests_from_step is not None:
            steps = tables.ledger_steps
            later = (steps.c.job_id == self.job_id, steps.c.step >= digests_from_step)
            connection.execute(update(steps).where(*later).values(digest=None))
        if micro_batches_of_step is not None:
            batches = tables.ledger_micro_batches
            its = (batches.c.job_id == self.job_id, batches.c.step == micro_batches_of_step)
            connection.execute(delete(batches).where(*its))

    def _set_digests(self, connection: Connection, digests: Mapping[int, str]) -> None:
        steps = tables.ledger_steps
        for step, digest in digests.items():
            check_text(f"step {step}", {"digest": digest})
            connection.execute(
                update(steps).where(steps.c.job_id == self.job_id, steps.c.step == step).values(digest=digest)
            )

    def _claim(self, connection: Connection, term: int, cursor: int | None) -> None:
        """Check the term and move the cursor in one statement, which locks the row on PostgreSQL."""
        ledgers = tables.ledgers
        claimed = connection.execute(
            update(ledgers)
            .where(ledgers.c.job_id == self.job_id, ledgers.c.term == term)
            .values(cursor=func.coalesce(bindparam("moved_to", cursor), ledgers.c.cursor))
        )
        if claimed.rowcount == 1:
            return
        stored = connection.execute(
            select(ledgers.c.term).where(ledgers.c.job_id == self.job_id)
        ).scalar_one_or_none()
        raise self._fenced(term, stored)

    def _fenced(self, term: int, stored: int | None) -> Fenced:
        if stored is None:
            return Fenced(
                f"Nobody has taken over the ledger of job {self.job_id} yet.", hint="take_over first."
            )
        return Fenced(
            f"The ledger of job {self.job_id} is at term {stored}; this writer has term {term}.",
            hint="Another trainer has taken over: stop.",
            details={"stored": stored, "given": term},
        )

    def _group_rows(self, groups: Sequence[GroupRow]) -> list[dict[str, Any]]:
        latest: dict[int, dict[str, Any]] = {}
        for group in groups:
            if group.status not in STATUSES:
                raise StoreError(
                    f"Group {group.group_id} cannot be {group.status!r}.",
                    hint=f"One of {', '.join(STATUSES)}.",
                )
            row = {
                "job_id": self.job_id,
                "group_id": group.group_id,
                "status": group.status,
                "step": group.step,
                "version_min": group.version_min,
                "version_max": group.version_max,
                "payload": group.payload,
            }
            # A statement of many rows may touch a row only once (PostgreSQL): the last values count.
            for kept in ("payload", "version_min", "version_max"):
                if row[kept] is None and group.group_id in latest:
                    row[kept] = latest[group.group_id][kept]
            latest[group.group_id] = row
        return list(latest.values())

    def _step_rows(self, steps: Sequence[StepRow]) -> list[dict[str, Any]]:
        latest: dict[int, dict[str, Any]] = {}
        for step in steps:
            what = f"step {step.step}"
            check_text(what, {"digest": step.digest})
            latest[step.step] = {
                "job_id": self.job_id,
                "step": step.step,
                "version": step.version,
                "digest": step.digest,
                "group_ids": encode_body(step.group_ids, what),
                "metrics": encode_body(step.metrics, what),
                "at": step.at,
            }
        return list(latest.values())

    def _micro_batch_rows(self, batches: Sequence[MicroBatchRow]) -> list[dict[str, Any]]:
        return [
            {
                "job_id": self.job_id,
                "step": batch.step,
                "position": batch.position,
                "shares": encode_body(batch.shares, f"micro-batch {batch.position} of step {batch.step}"),
                "last": int(batch.last),
            }
            for batch in batches
        ]

    def _discard_rows(self, discards: Sequence[DiscardRow]) -> list[dict[str, Any]]:
        rows = []
        for discard in discards:
            what = f"discard {discard.number}"
            check_text(what, {"reason": discard.reason})
            rows.append(
                {
                    "job_id": self.job_id,
                    "number": discard.number,
                    "group_id": discard.group_id,
                    "reason": discard.reason,
                    "tokens": discard.tokens,
                    "replaced_by": discard.replaced_by,
                    "evidence": encode_body(discard.evidence, what),
                    "at": discard.at,
                }
            )
        return rows

    def _passes_row(self, passes: PassesRow) -> dict[str, Any]:
        what = f"passes {passes.number}"
        return {
            "job_id": self.job_id,
            **asdict(passes),
            "size": encode_body(passes.size, what),
            "error": encode_body(passes.error, what),
        }

    def _drop_payloads(self, connection: Connection, through_step: int) -> None:
        groups, checkpoints = tables.ledger_groups, tables.ledger_checkpoints
        newest = (
            select(func.max(checkpoints.c.step)).where(checkpoints.c.job_id == self.job_id).scalar_subquery()
        )
        connection.execute(
            update(groups)
            .where(
                groups.c.job_id == self.job_id,
                _trained,
                groups.c.step <= through_step,
                groups.c.step <= newest,
                groups.c.payload.is_not(None),
            )
            .values(payload=None)
        )

    # -- reading -------------------------------------------------------------------------------------------

    def load(self) -> LedgerRows:
        """Returns everything that a new writer needs, as of one moment. Empty, at term 0, if there is no ledger yet."""
        ledgers, checkpoints = tables.ledgers, tables.ledger_checkpoints
        with self._database.read() as connection:
            head = connection.execute(
                select(ledgers.c.term, ledgers.c.cursor).where(ledgers.c.job_id == self.job_id)
            ).one_or_none()
            checkpoint_rows = connection.execute(
                select(checkpoints.c.step, checkpoints.c.path, checkpoints.c.at)
                .where(checkpoints.c.job_id == self.job_id)
                .order_by(checkpoints.c.step)
            ).all()
            covered = checkpoint_rows[-1][0] if checkpoint_rows else None
            groups = self._uncovered_groups(connection, covered)
            steps = self._all_steps(connection)
            micro_batches = self._uncovered_micro_batches(connection, covered)
            discards = tables.ledger_discards
            count = connection.execute(
                select(func.max(discards.c.number)).where(discards.c.job_id == self.job_id)
            ).scalar()
            replaced = connection.execute(
                select(discards.c.group_id, discards.c.replaced_by).where(
                    discards.c.job_id == self.job_id, discards.c.replaced_by.is_not(None)
                )
            ).all()
            restores = tables.ledger_restores
            restore_rows = connection.execute(
                select(*(restores.c[item.name] for item in fields(RestoreRow)))
                .where(restores.c.job_id == self.job_id)
                .order_by(restores.c.number)
            ).all()
            passes = tables.ledger_passes
            passes_rows = connection.execute(
                select(*(passes.c[item.name] for item in fields(PassesRow)))
                .where(passes.c.job_id == self.job_id)
                .order_by(passes.c.number)
            ).all()
        return LedgerRows(
            term=head[0] if head else 0,
            cursor=head[1] if head else 0,
            groups=groups,
            steps=steps,
            checkpoints=[CheckpointRow(step, path, at) for step, path, at in checkpoint_rows],
            micro_batches=micro_batches,
            discards=count or 0,
            replaced={old: new for old, new in replaced if new is not None},
            restores=[RestoreRow(*row) for row in restore_rows],
            passes=[_passes_row(*row) for row in passes_rows],
        )

    def _uncovered_groups(self, connection: Connection, covered: int | None) -> list[GroupRow]:
        """Those that no checkpoint covers, in order. `covered` is the newest one's step."""
        groups = tables.ledger_groups
        columns = (
            groups.c.group_id,
            groups.c.status,
            groups.c.step,
            groups.c.version_min,
            groups.c.version_max,
            groups.c.payload,
        )
        # Two queries, each with the partial index made for it.
        open_rows = connection.execute(
            select(*columns).where(groups.c.job_id == self.job_id, _not_trained)
        ).all()
        uncovered = select(*columns).where(groups.c.job_id == self.job_id, _trained)
        if covered is not None:
            uncovered = uncovered.where(groups.c.step.is_(None) | (groups.c.step > covered))
        rows = (*open_rows, *connection.execute(uncovered).all())
        return sorted((_group_row(*row) for row in rows), key=lambda group: group.group_id)

    def _all_steps(self, connection: Connection) -> list[StepRow]:
        steps = tables.ledger_steps
        rows = connection.execute(
            select(
                steps.c.step,
                steps.c.version,
                steps.c.digest,
                steps.c.group_ids,
                steps.c.metrics,
                steps.c.at,
            )
            .where(steps.c.job_id == self.job_id)
            .order_by(steps.c.step)
        ).all()
        return [
            StepRow(
                step,
                version,
                digest,
                decode_body(ids, f"step {step}"),
                decode_body(metrics, f"step {step}"),
                at,
            )
            for step, version, digest, ids, metrics, at in rows
        ]

    def _uncovered_micro_batches(self, connection: Connection, covered: int | None) -> list[MicroBatchRow]:
        batches = tables.ledger_micro_batches
        rows = connection.execute(
            select(batches.c.step, batches.c.position, batches.c.shares, batches.c.last)
            .where(batches.c.job_id == self.job_id, batches.c.step > (covered or 0))
            .order_by(batches.c.step, batches.c.position)
        ).all()
        return [_micro_batch_row(*row) for row in rows]

    def metrics(
        self, *, after: int = 0, limit: int | None = None, newest: bool = False
    ) -> list[dict[str, Any]]:
        """The metrics of the steps beyond `after`, in order: the first `limit` of them, or with `newest` the last."""
        steps = tables.ledger_steps
        wanted = select(steps.c.step, steps.c.metrics).where(
            steps.c.job_id == self.job_id, steps.c.step > after
        )
        wanted = wanted.order_by(steps.c.step.desc() if newest else steps.c.step).limit(limit)
        with self._database.read() as connection:
            rows = connection.execute(wanted).all()
        found = [{**decode_body(metrics, f"step {step}"), "step": step} for step, metrics in rows]
        return found[::-1] if newest else found

    def sparse_metrics(self, points: int) -> list[dict[str, Any]]:
        """The metrics of at most `points` steps, evenly spread from the first on, and of the last, in order: what costs
        the same for a job of any length."""
        steps = tables.ledger_steps
        mine = steps.c.job_id == self.job_id
        with self._database.read() as connection:
            first, last = connection.execute(
                select(func.min(steps.c.step), func.max(steps.c.step)).where(mine)
            ).one()
            if first is None:
                return []
            stride = -(-(last - first + 1) // points)
            rows = connection.execute(
                select(steps.c.step, steps.c.metrics)
                .where(mine, steps.c.step.in_([*range(first, last, stride), last]))
                .order_by(steps.c.step)
            ).all()
        return [{**decode_body(metrics, f"step {step}"), "step": step} for step, metrics in rows]

    def load_trained(self, *, after: int, through: int) -> tuple[list[GroupRow], list[MicroBatchRow]]:
        """The groups that the steps after `after` up to `through` trained, and the micro-batches of those steps."""
        groups, batches = tables.ledger_groups, tables.ledger_micro_batches
        with self._database.read() as connection:
            group_rows = connection.execute(
                select(
                    groups.c.group_id,
                    groups.c.status,
                    groups.c.step,
                    groups.c.version_min,
                    groups.c.version_max,
                    groups.c.payload,
                )
                .where(
                    groups.c.job_id == self.job_id,
                    _trained,
                    groups.c.step > after,
                    groups.c.step <= through,
                )
                .order_by(groups.c.group_id)
            ).all()
            batch_rows = connection.execute(
                select(batches.c.step, batches.c.position, batches.c.shares, batches.c.last)
                .where(batches.c.job_id == self.job_id, batches.c.step > after, batches.c.step <= through)
                .order_by(batches.c.step, batches.c.position)
            ).all()
        return (
            [_group_row(*row) for row in group_rows],
            [_micro_batch_row(*row) for row in batch_rows],
        )

    def audit(self) -> LedgerAudit:
        """Count and cross-check, in SQL."""
        dialect = "sqlite" if self._database.is_sqlite else "postgresql"
        mine = {"job_id": self.job_id}
        with self._database.read() as connection:
            counts = connection.execute(text(_COUNTS), mine).all()
            cursor = connection.execute(text(_CURSOR), mine).scalar()
            twice = connection.execute(text(_LISTED[dialect] + _DUPLICATES), mine).all()
            gaps = connection.execute(text(_GAPS), mine).all()
            unlisted = connection.execute(text(_LISTED[dialect] + _UNLISTED), mine).scalar_one()
            discarded = connection.execute(text(_DISCARDED), mine).all()
        duplicates: dict[int, list[int]] = {}
        for group_id, step in twice:
            duplicates.setdefault(group_id, []).append(step)
        return LedgerAudit(
            counts=dict.fromkeys(STATUSES, 0) | dict(counts),
            duplicates=duplicates,
            gaps=[(first, last) for first, last in gaps],
            unlisted=unlisted,
            cursor=cursor or 0,
            discarded={reason: int(tokens) for reason, tokens in discarded},
        )


def _group_row(
    group_id: int, status: str, step: int | None, low: int | None, high: int | None, payload: Any
) -> GroupRow:
    return GroupRow(group_id, status, step, low, high, None if payload is None else bytes(payload))


def _micro_batch_row(step: int, position: int, shares: Any, last: Any) -> MicroBatchRow:
    return MicroBatchRow(
        step, position, decode_body(shares, f"micro-batch {position} of step {step}"), bool(last)
    )


def _passes_row(number: int, role: str, from_step: int, halved: int, size: Any, error: Any) -> PassesRow:
    what = f"passes {number}"
    return PassesRow(number, role, from_step, halved, decode_body(size, what), decode_body(error, what))


# Literals, not parameters, so that the planner sees that a partial index fits.
_trained: ColumnElement[Any] = literal_column("gyre_ledger_groups.status = 'trained'")
_not_trained: ColumnElement[Any] = literal_column("gyre_ledger_groups.status <> 'trained'")

_COUNTS = "SELECT status, count(*) FROM gyre_ledger_groups WHERE job_id = :job_id GROUP BY status"
_DISCARDED = "SELECT reason, sum(tokens) FROM gyre_ledger_discards WHERE job_id = :job_id GROUP BY reason"
_CURSOR = "SELECT cursor FROM gyre_ledgers WHERE job_id = :job_id"

_LISTED = {
    "sqlite": (
        "WITH listed AS (SELECT s.step AS step, g.value AS group_id"
        " FROM gyre_ledger_steps s, json_each(s.group_ids) g WHERE s.job_id = :job_id) "
    ),
    "postgresql": (
        "WITH listed AS (SELECT s.step AS step, CAST(g.value AS bigint) AS group_id"
        " FROM gyre_ledger_steps s, jsonb_array_elements_text(CAST(s.group_ids AS jsonb)) AS g(value)"
        " WHERE s.job_id = :job_id) "
    ),
}

_DUPLICATES = (
    "SELECT group_id, step FROM listed WHERE group_id IN"
    " (SELECT group_id FROM listed GROUP BY group_id HAVING count(*) > 1) ORDER BY group_id, step"
)

_UNLISTED = (
    "SELECT count(*) FROM gyre_ledger_groups g"
    " JOIN gyre_ledger_steps s ON s.job_id = g.job_id AND s.step = g.step"
    " WHERE g.job_id = :job_id AND g.status = 'trained' AND NOT EXISTS"
    " (SELECT 1 FROM listed l WHERE l.step = g.step AND l.group_id = g.group_id)"
)

# A hole lies between two neighbours that differ by more than one; -1 and the cursor are the outermost ones.
_GAPS = (
    "WITH known AS (SELECT -1 AS id UNION ALL"
    " SELECT group_id FROM gyre_ledger_groups WHERE job_id = :job_id AND group_id >= 0 AND group_id <"
    " (SELECT cursor FROM gyre_ledgers WHERE job_id = :job_id)"
    " UNION ALL SELECT cursor FROM gyre_ledgers WHERE job_id = :job_id),"
    " pairs AS (SELECT id, lead(id) OVER (ORDER BY id) AS following FROM known)"
    " SELECT id + 1, following - 1 FROM pairs WHERE following > id + 1 ORDER BY id"
)
