"""The journal of one job: its events, the snapshot that they fold to, and the commands that they caused.

Invariants:
    One-transaction     the events of an append, their snapshot rows and their commands become visible, and
                        durable, together or not at all.
    One-writer          an append carries the epoch of its writer. `take_over` raises the stored epoch, and
                        from then on every append with an older one is Fenced and changes nothing.
    Seq-is-dense        an append begins at `last_seq() + 1` and has no hole.
    Re-send-is-safe     entries that are already stored (same number, same event id) are accepted again and
                        change nothing, so after a failure of unknown outcome the same entries are sent again.
    Prefix-only         every read of events yields a prefix of the history after a given number, because a
                        fold of anything else means nothing.

This file must not know what an event means, or when a command is done: the caller says both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, func, insert, select, text, tuple_, update

from gyre.errors import Fenced, GyreError, NotFound, StoreError
from gyre.store import tables
from gyre.store.database import Database, is_unique_violation
from gyre.store.tables import check_text, decode_body, encode_body
from gyre.store.write_lock import holder_of

_KEYS_PER_STATEMENT = 200

_SELECT_EVENTS = select(
    tables.events.c.seq,
    tables.events.c.event_id,
    tables.events.c.cause,
    tables.events.c.kind,
    tables.events.c.at,
    tables.events.c.actor,
    tables.events.c.epoch,
    tables.events.c.body,
)


@dataclass(frozen=True, slots=True)
class StoredCommand:
    """A command, carried out after the commit. `id` is unique in its job and makes carrying it out idempotent."""

    id: str
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with everything that must be committed together with it.

    `seq` is the event's number, `cause` the id of the command or event that led to it, `at` the time in seconds
    since 1970. `upserts` and `deletes` are snapshot rows by (kind, key), `commands` the commands that the event
    causes, `done` the ids of the commands whose results it is.
    """

    seq: int
    event_id: str
    cause: str | None
    kind: str
    at: float
    actor: str
    body: dict[str, Any]
    upserts: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    deletes: Sequence[tuple[str, str]] = ()
    commands: Sequence[StoredCommand] = ()
    done: Sequence[str] = ()

    def __str__(self) -> str:
        return f"event {self.seq} ({self.kind}, {self.event_id})"


class EventRow(NamedTuple):
    """One stored event. (A named tuple: a replay makes a hundred thousand of them.)"""

    seq: int
    event_id: str
    cause: str | None
    kind: str
    at: float
    actor: str
    epoch: int
    body: dict[str, Any]

    def as_view(self) -> dict[str, Any]:
        """The event as the REST interface and the command line show it."""
        return {
            "seq": self.seq,
            "id": self.event_id,
            "cause": self.cause,
            "kind": self.kind,
            "at": self.at,
            "actor": self.actor,
            "body": self.body,
        }


@dataclass(frozen=True, slots=True)
class CommandRow:
    """One command of the outbox that is not done; `seq` is the event that caused it."""

    seq: int
    id: str
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """An `Entry` whose bodies are JSON text, encoded before any lock is taken."""

    seq: int
    event_id: str
    cause: str | None
    kind: str
    at: float
    actor: str
    body: str
    upserts: tuple[tuple[tuple[str, str], str], ...]
    deletes: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str, str], ...]
    done: tuple[str, ...]


def encode_entry(entry: Entry) -> EncodedEntry:
    """The encoded entry. StoreError if something in it cannot be stored, or if `upserts` and `deletes` share a
    key, because their order is not known."""
    _check_names(entry)
    for address in entry.deletes:
        if address in entry.upserts:
            raise StoreError(f"{entry} both writes and deletes the snapshot row {address}.")
    return EncodedEntry(
        seq=entry.seq,
        event_id=entry.event_id,
        cause=entry.cause,
        kind=entry.kind,
        at=entry.at,
        actor=entry.actor,
        body=encode_body(entry.body, entry),
        upserts=tuple((address, encode_body(body, entry)) for address, body in entry.upserts.items()),
        deletes=tuple(entry.deletes),
        commands=tuple(
            (command.id, command.kind, encode_body(command.body, entry)) for command in entry.commands
        ),
        done=tuple(entry.done),
    )


def _check_names(entry: Entry) -> None:
    texts = [entry.event_id, entry.cause or "", entry.kind, entry.actor, *entry.done]
    for address in (*entry.upserts, *entry.deletes):
        texts += address
    for command in entry.commands:
        texts += (command.id, command.kind)
    together = "".join(texts)
    if not together.isascii() or "\x00" in together:  # rare: check each, to name the bad one
        for each in texts:
            check_text(entry, {"An id, kind or key": each})


class Journal:
    """The journal of `job_id`. Safe to use from many threads; every call is one transaction of its own."""

    def __init__(self, database: Database, job_id: str) -> None:
        self.job_id = job_id
        self._database = database
        self._upsert_snapshot = database.upsert(tables.snapshot)

    def held_by(self) -> int | None:
        """The process that holds the database's one write lock. None where nobody does, where that cannot be told, and
        for PostgreSQL, which locks rows: who stands still in a transaction there does not hold up this journal."""
        path = self._database.path
        return holder_of(path) if path is not None else None

    # -- writing -------------------------------------------------------------------------------------------

    def take_over(self, *, now: float, pid: int) -> int:
        """Raise the epoch by one and return it. The holder of the old one is Fenced from now on."""
        journals, jobs = tables.journals, tables.jobs
        with self._database.write() as connection:
            epoch = connection.execute(
                update(journals)
                .where(journals.c.job_id == self.job_id)
                .values(epoch=journals.c.epoch + 1, taken_at=now)
                .returning(journals.c.epoch)
            ).scalar_one_or_none()
            if epoch is None:
                raise self._unknown()
            connection.execute(update(jobs).where(jobs.c.job_id == self.job_id).values(master_pid=pid))
            done = tables.outbox.c.done_seq.is_not(None)  # by a Gyre that kept what was done
            connection.execute(tables.outbox.delete().where(tables.outbox.c.job_id == self.job_id, done))
        return int(epoch)

    def append(self, epoch: int, entries: Sequence[Entry]) -> None:
        """Commit all the entries in one transaction, durably.

        Fenced if a newer epoch has taken the job over; StoreError if the numbers do not follow the stored
        ones or an id is used twice; StoreFull if there is no space (send the same entries again later).
        """
        self.append_encoded(epoch, [encode_entry(entry) for entry in entries])

    def append_encoded(self, epoch: int, entries: Sequence[EncodedEntry]) -> None:
        """`append`, for a caller that has encoded the entries itself."""
        if not entries:
            return
        self._check_batch(entries)
        try:
            with self._database.write() as connection:
                fresh = self._claim(connection, epoch, entries)
                if fresh:
                    self._insert(connection, epoch, fresh)
        except StoreError as error:
            if is_unique_violation(error):
                raise self._name_duplicate(entries, error) from error
            raise

    def _check_batch(self, entries: Sequence[EncodedEntry]) -> None:
        first = entries[0].seq
        for offset, entry in enumerate(entries):
            if entry.seq != first + offset:
                raise StoreError(
                    f"Event {entry.event_id} of job {self.job_id} is numbered {entry.seq} where "
                    f"{first + offset} must follow.",
                    hint="The entries of one append are consecutive.",
                )

    def _claim(
        self, connection: Connection, epoch: int, entries: Sequence[EncodedEntry]
    ) -> Sequence[EncodedEntry]:
        """Check epoch and number and move `last_seq`, in one statement (which also locks the row on
        PostgreSQL). Returns the entries that are not stored yet."""
        first, last = entries[0].seq, entries[-1].seq
        if self._advance(connection, epoch, first - 1, last):
            return entries
        journals = tables.journals
        row = connection.execute(
            select(journals.c.epoch, journals.c.last_seq)
            .where(journals.c.job_id == self.job_id)
            .with_for_update()
        ).one_or_none()
        if row is None:
            raise self._unknown()
        stored_epoch, stored_seq = int(row[0]), int(row[1])
        if stored_epoch != epoch:
            raise Fenced(
                f"Job {self.job_id} is at epoch {stored_epoch}; this writer has epoch {epoch}.",
                hint="Another master has taken the job over: stop.",
                details={"stored": stored_epoch, "given": epoch},
            )
        fresh = self._without_stored(connection, entries, stored_seq)
        if fresh:
            self._advance(connection, epoch, stored_seq, last)
        return fresh

    def _advance(self, connection: Connection, epoch: int, from_seq: int, to_seq: int) -> bool:
        journals = tables.journals
        moved = connection.execute(
            update(journals)
            .where(
                journals.c.job_id == self.job_id,
                journals.c.epoch == epoch,
                journals.c.last_seq == from_seq,
            )
            .values(last_seq=to_seq)
        )
        return moved.rowcount == 1

    def _without_stored(
        self, connection: Connection, entries: Sequence[EncodedEntry], stored_seq: int
    ) -> Sequence[EncodedEntry]:
        first = entries[0].seq
        if first > stored_seq + 1:
            raise StoreError(
                f"Event {first} of job {self.job_id} would leave a hole: the last stored is {stored_seq}.",
                hint="Send the entries between them first.",
                details={"last_seq": stored_seq, "given": first},
            )
        events = tables.events
        stored: dict[int, str] = dict(
            connection.execute(
                select(events.c.seq, events.c.event_id).where(
                    events.c.job_id == self.job_id,
                    events.c.seq >= first,
                    events.c.seq <= entries[-1].seq,
                )
            ).all()
        )
        for entry in entries:
            if entry.seq in stored and stored[entry.seq] != entry.event_id:
                raise StoreError(
                    f"Number {entry.seq} of job {self.job_id} belongs to event {stored[entry.seq]}, "
                    f"not to {entry.event_id}.",
                    hint="Two writers share an epoch, or the state was not folded up to last_seq().",
                    details={"last_seq": stored_seq, "given": entry.seq},
                )
        return [entry for entry in entries if entry.seq > stored_seq]

    def _insert(self, connection: Connection, epoch: int, entries: Sequence[EncodedEntry]) -> None:
        connection.execute(
            insert(tables.events),
            [
                {
                    "job_id": self.job_id,
                    "seq": entry.seq,
                    "event_id": entry.event_id,
                    "cause": entry.cause,
                    "kind": entry.kind,
                    "at": entry.at,
                    "actor": entry.actor,
                    "epoch": epoch,
                    "body": entry.body,
                }
                for entry in entries
            ],
        )
        self._write_snapshot(connection, entries)
        self._write_outbox(connection, entries)

    def _write_snapshot(self, connection: Connection, entries: Sequence[EncodedEntry]) -> None:
        latest: dict[tuple[str, str], tuple[int, str | None]] = {}
        for entry in entries:
            for address, body in entry.upserts:
                latest[address] = (entry.seq, body)
            for address in entry.deletes:
                latest[address] = (entry.seq, None)
        # Sorted: the same rows are always locked in the same order.
        written = [
            {"job_id": self.job_id, "kind": kind, "key": key, "seq": seq, "body": body}
            for (kind, key), (seq, body) in sorted(latest.items())
            if body is not None
        ]
        if written:
            connection.execute(self._upsert_snapshot, written)
        deleted = sorted(address for address, (_, body) in latest.items() if body is None)
        rows = tables.snapshot
        for start in range(0, len(deleted), _KEYS_PER_STATEMENT):
            connection.execute(
                rows.delete().where(
                    rows.c.job_id == self.job_id,
                    tuple_(rows.c.kind, rows.c.key).in_(deleted[start : start + _KEYS_PER_STATEMENT]),
                )
            )

    def _write_outbox(self, connection: Connection, entries: Sequence[EncodedEntry]) -> None:
        outbox = tables.outbox
        issued = [
            {
                "job_id": self.job_id,
                "command_id": command_id,
                "seq": entry.seq,
                "position": position,
                "kind": kind,
                "body": body,
                "done_seq": None,
            }
            for entry in entries
            for position, (command_id, kind, body) in enumerate(entry.commands)
        ]
        if issued:
            connection.execute(insert(outbox), issued)
        done = [
            {"the_job": self.job_id, "the_id": command_id} for entry in entries for command_id in entry.done
        ]
        if done:
            # Nobody looks at a command that is done, and a long job has many. An id that is not in the outbox is no
            # error: the command was done before, or is from the state before the journal began.
            connection.execute(
                outbox.delete().where(
                    outbox.c.job_id == bindparam("the_job"), outbox.c.command_id == bindparam("the_id")
                ),
                done,
            )

    def _name_duplicate(self, entries: Sequence[EncodedEntry], error: GyreError) -> StoreError:
        """An error that names the duplicate ids and where they are. It reads in a transaction of its own, because the
        failed one is gone."""
        ids = {entry.event_id: entry.seq for entry in entries}
        commands = [command[0] for entry in entries for command in entry.commands]
        found: list[str] = []
        if len(ids) < len(entries):
            found.append("one event id is used twice in this append")
        if len(set(commands)) < len(commands):
            found.append("one command id is used twice in this append")
        for start in range(0, len(entries), _KEYS_PER_STATEMENT):
            part = list(ids)[start : start + _KEYS_PER_STATEMENT]
            found += [f"event {event_id} is stored as number {seq}" for seq, event_id in self._seqs_of(part)]
        outbox = tables.outbox
        for start in range(0, len(commands), _KEYS_PER_STATEMENT):
            with self._database.read() as connection:
                taken = connection.execute(
                    select(outbox.c.command_id, outbox.c.seq).where(
                        outbox.c.job_id == self.job_id,
                        outbox.c.command_id.in_(commands[start : start + _KEYS_PER_STATEMENT]),
                    )
                ).all()
            found += [f"command {command_id} was issued by event {seq}" for command_id, seq in taken]
        return StoreError(
            f"An id of job {self.job_id} is there already: {'; '.join(found[:5]) or error.message}.",
            hint="Event and command ids are unique in a job; nothing of this append was stored.",
            details={"duplicate": True},
        )

    def _seqs_of(self, event_ids: Sequence[str]) -> Sequence[tuple[int, str]]:
        events = tables.events
        with self._database.read() as connection:
            return connection.execute(
                select(events.c.seq, events.c.event_id).where(
                    events.c.job_id == self.job_id, events.c.event_id.in_(event_ids)
                )
            ).all()

    def _unknown(self) -> NotFound:
        return NotFound(
            f"Job {self.job_id} has no journal in {self._database.where}.", hint="create_job comes first."
        )

    # -- reading -------------------------------------------------------------------------------------------

    def events(
        self,
        *,
        after: int = 0,
        until: int | None = None,
        limit: int | None = None,
        until_time: float | None = None,
    ) -> list[EventRow]:
        """The events numbered after `after` and up to `until`, in order, at most `limit`.

        `until_time`, in seconds since 1970, ends the list before the first later event, even if a clock that was
        set back gave a following event an earlier time (Prefix-only).
        """
        table = tables.events
        query = _SELECT_EVENTS.where(table.c.job_id == self.job_id, table.c.seq > after).order_by(table.c.seq)
        if until is not None:
            query = query.where(table.c.seq <= until)
        if limit is not None:
            query = query.limit(limit)
        with self._database.read() as connection:
            if until_time is not None:
                later = connection.execute(
                    select(func.min(table.c.seq)).where(
                        table.c.job_id == self.job_id, table.c.at > until_time
                    )
                ).scalar()
                if later is not None:
                    query = query.where(table.c.seq < later)
            rows = connection.execute(query).all()
        return [_event_row(row) for row in rows]

    def continued(self) -> list[EventRow]:
        """The events from which on another spec was in force: few, and found by an index of their own."""
        table = tables.events
        with self._database.read() as connection:
            rows = connection.execute(
                _SELECT_EVENTS
                # As text: a partial index is used only where its condition stands in the query itself. And not by the
                # bare column: SQLite would then walk through all of the job's events, by the primary key.
                .where(table.c.job_id.concat("") == self.job_id, text("kind = 'JobContinued'")).order_by(
                    table.c.seq
                )
            ).all()
        return [_event_row(row) for row in rows]

    def seq_at(self, at: float, *, after: int = 0) -> int:
        """The number of the last event before the first one beyond `after` that is later than `at` (seconds since
        1970); as with `until_time`, clocks that were set back do not count (Prefix-only)."""
        table = tables.events
        with self._database.read() as connection:
            later = connection.execute(
                select(table.c.seq)
                .where(table.c.job_id == self.job_id, table.c.seq > after, table.c.at > at)
                .order_by(table.c.seq)
                .limit(1)
            ).scalar_one_or_none()
        return self.last_seq() if later is None else int(later) - 1

    def last_seq(self) -> int:
        """The number of the last event; 0 if there is none."""
        return self._number("last_seq")

    def epoch(self) -> int:
        """The epoch of the present writer; 0 if nobody has taken the job over yet."""
        return self._number("epoch")

    def _number(self, column: str) -> int:
        journals = tables.journals
        with self._database.read() as connection:
            value = connection.execute(
                select(journals.c[column]).where(journals.c.job_id == self.job_id)
            ).scalar_one_or_none()
        if value is None:
            raise self._unknown()
        return int(value)

    def snapshot(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The bodies of the snapshot rows by (kind, key): the fold of all events."""
        table = tables.snapshot
        with self._database.read() as connection:
            rows = connection.execute(
                select(table.c.kind, table.c.key, table.c.body)
                .where(table.c.job_id == self.job_id)
                .order_by(table.c.kind, table.c.key)
            ).all()
        return {(kind, key): decode_body(body, f"snapshot row {(kind, key)}") for kind, key, body in rows}

    def pending_commands(self) -> list[CommandRow]:
        """The commands that are not done, in the order in which they were issued."""
        outbox = tables.outbox
        with self._database.read() as connection:
            rows = connection.execute(
                select(outbox.c.seq, outbox.c.command_id, outbox.c.kind, outbox.c.body)
                .where(outbox.c.job_id == self.job_id, outbox.c.done_seq.is_(None))
                .order_by(outbox.c.seq, outbox.c.position)
            ).all()
        return [
            CommandRow(seq, command_id, kind, decode_body(body, f"command {command_id}"))
            for seq, command_id, kind, body in rows
        ]


def _event_row(row: Any) -> EventRow:
    seq, event_id, cause, kind, at, actor, epoch, body = row
    return EventRow(seq, event_id, cause, kind, at, actor, epoch, decode_body(body, f"event {seq}"))
