"""The tables of the store, and the one JSON encoding of everything that is stored as text.

Invariants:
    One-live-name    two jobs that have not ended never bear the same name (a unique partial index).
    Seq-is-dense     the events of a job are numbered 1, 2, 3, ... without a hole; `gyre_journals.last_seq`
                     is the number of the last one, and is changed in the transaction that inserts it.
    Said-once        an event id occurs once in a job's journal (a unique index).
    Plain-JSON       a body is JSON text: compact, keys sorted, ASCII, and never NaN or an infinity, so that
                     equal bodies are equal bytes and any database (and any other program) can read them.

A table's name begins with `gyre_`, since a PostgreSQL database may be shared with others. The migrations in
`migrations/versions/` create the tables; a test compares them with this file.
This file must not know what an event, a vertex or a job phase is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from gyre.errors import StoreCorrupt, StoreError

HEAD = "0012"
"""The revision that this code reads and writes: the newest file in `migrations/versions/`."""

KNOWN_REVISIONS = ("0008", "0009", "0010", "0011", "0012")
"""Every revision that this code can migrate from. Lower ones are of before the first release, higher ones of a newer
Gyre."""

VERSION_TABLE = "gyre_schema"

metadata = MetaData()

store = Table(
    "gyre_store",
    metadata,
    Column("store_id", Text, primary_key=True),
    Column("commits", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""One row. `commits` is counted on SQLite only, whose file can be replaced by an older copy of itself
(`gyre.store.presence`)."""

jobs = Table(
    "gyre_jobs",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("ray_address", Text),
    Column("namespace", Text),
    Column("master_pid", Integer),
    Column("url", Text),
    Column("token_hint", Text),
    Column("queued_since", Float),
    Column("queued_at", Float),
    Index(
        "gyre_jobs_one_live_name",
        "name",
        unique=True,
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    ),
    Index("gyre_jobs_by_age", "created_at"),
)

job_labels = Table(
    "gyre_job_labels",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("tags", Text, nullable=False),
    Column("notes", Text, nullable=False),
)
"""What users say of a job: nothing depends on it. `tags` is a JSON list in the order of the alphabet."""

job_summaries = Table(
    "gyre_job_summaries",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("form", Integer, nullable=False),
    Column("body", Text, nullable=False),
)
"""What a list shows of a job as it was after event `seq`: derived, so a row may be removed at any time. `form` is which
keys the JSON `body` has; one of another form, or not of the journal's last event, counts for nothing."""

# Apart from `gyre_jobs`, because this narrow row changes with every commit, and the job's row with its spec rarely.
journals = Table(
    "gyre_journals",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("taken_at", Float),
)

events = Table(
    "gyre_events",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("event_id", Text, nullable=False),
    Column("cause", Text),
    Column("kind", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("actor", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    UniqueConstraint("job_id", "event_id", name="gyre_events_said_once"),
    Index(
        "gyre_events_continued",
        "job_id",
        "seq",
        sqlite_where=text("kind = 'JobContinued'"),
        postgresql_where=text("kind = 'JobContinued'"),
    ),
    sqlite_with_rowid=False,
)
"""The few events from which on another spec was in force have an index of their own: who folds a part of a history
needs them all."""

snapshot = Table(
    "gyre_snapshot",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    sqlite_with_rowid=False,
)

outbox = Table(
    "gyre_outbox",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("command_id", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("done_seq", BigInteger),
    Index(
        "gyre_outbox_pending",
        "job_id",
        "seq",
        "position",
        sqlite_where=text("done_seq IS NULL"),
        postgresql_where=text("done_seq IS NULL"),
    ),
    sqlite_with_rowid=False,
)

ledgers = Table(
    "gyre_ledgers",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("term", BigInteger, nullable=False),
    Column("cursor", BigInteger, nullable=False),
    Column("data", Text),
)

ledger_groups = Table(
    "gyre_ledger_groups",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("group_id", BigInteger, primary_key=True, autoincrement=False),
    Column("status", Text, nullable=False),
    Column("step", BigInteger),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    Column("payload", LargeBinary),
    Index(
        "gyre_ledger_groups_open",
        "job_id",
        "group_id",
        sqlite_where=text("status <> 'trained'"),
        postgresql_where=text("status <> 'trained'"),
    ),
    Index(
        "gyre_ledger_groups_trained",
        "job_id",
        "step",
        sqlite_where=text("status = 'trained'"),
        postgresql_where=text("status = 'trained'"),
    ),
)

ledger_steps = Table(
    "gyre_ledger_steps",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger),
    Column("digest", Text),
    Column("group_ids", Text, nullable=False),
    Column("metrics", Text, nullable=False),
    Column("at", Float, nullable=False),
)

ledger_checkpoints = Table(
    "gyre_ledger_checkpoints",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("at", Float, nullable=False),
)

ledger_micro_batches = Table(
    "gyre_ledger_micro_batches",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("shares", Text, nullable=False),
    Column("last", Integer, nullable=False),
)

ledger_discards = Table(
    "gyre_ledger_discards",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("group_id", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("replaced_by", BigInteger),
    Column("evidence", Text, nullable=False),
    Column("at", Float, nullable=False),
)

ledger_restores = Table(
    "gyre_ledger_restores",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("role", Text, nullable=False),
    Column("gang", BigInteger, nullable=False),
    Column("source", Text, nullable=False),
    Column("checkpoint_step", BigInteger, nullable=False),
    Column("step", BigInteger),
    Column("seconds", Float),
)

ledger_passes = Table(
    "gyre_ledger_passes",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("role", Text, nullable=False),
    Column("from_step", BigInteger, nullable=False),
    Column("halved", Integer, nullable=False),
    Column("size", Text, nullable=False),
    Column("error", Text, nullable=False),
)

rollouts = Table(
    "gyre_rollouts",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("term", BigInteger, nullable=False),
    Column("counters", Text, nullable=False),
)

rollout_groups = Table(
    "gyre_rollout_groups",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("request_id", BigInteger, primary_key=True, autoincrement=False),
    Column("request", LargeBinary, nullable=False),
)

rollout_deltas = Table(
    "gyre_rollout_deltas",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
)

rollout_sessions = Table(
    "gyre_rollout_sessions",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)
"""Sessions of several turns, and the groups that they are of; the turns' tokens are in the rows of groups and
deltas."""

series = Table(
    "gyre_series",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("resolution_s", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)
"""The numbers of a job over time: a row has those of every source, for `resolution_s` seconds from `at` on."""

# The body stands last: whoever looks for a row by the small columns reads no more of it than lies on the same page.
keyframes = Table(
    "gyre_keyframes",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("after", BigInteger, nullable=False),
    Column("latest", Float, nullable=False),
    Column("form", Text, nullable=False),
    Column("checksum", Text, nullable=False),
    Column("decisions", Text, nullable=False),
    Column("chapter", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""The state of a job after event `seq`. `latest` is the latest time of any event up to there. `decisions` (numbers, as
JSON text) and `chapter` (packed) are of the events after `after`, the keyframe before."""

# ASCII, because a lone surrogate (a model can generate half a character) has no UTF-8 form, and PostgreSQL refuses a
# NUL inside a string; as \ud800 and \u0000 both survive.
_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def encode_body(body: Any, what: object) -> str:
    """`body` as JSON text. StoreError (naming `what`) if it holds NaN, an infinity or a non-JSON type."""
    try:
        _require_text_keys(body)
        return _encoder.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"The body of {what} is not plain JSON: {error}.",
            hint="Bodies hold dicts with string keys, lists, strings, finite numbers, booleans and None.",
        ) from error


def _require_text_keys(value: Any) -> None:
    """Raises TypeError for a key that is no text: `json` would silently turn 1 into "1"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is {type(key).__name__}, not str")
            if isinstance(inner, (dict, list, tuple)):
                _require_text_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            if isinstance(inner, (dict, list, tuple)):
                _require_text_keys(inner)


def decode_body(stored: str, what: str) -> Any:
    """The inverse of `encode_body`. StoreCorrupt (naming `what`) if the text is not JSON."""
    try:
        return json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(
            f"The stored body of {what} is not JSON: {error}.",
            hint="The row was changed or damaged outside Gyre; restore the store from a copy.",
        ) from error


def check_text(what: object, values: Mapping[str, str | None]) -> None:
    """Refuse names and ids that some database cannot hold (NUL, a lone surrogate), before any SQL is sent."""
    for field, value in values.items():
        if value is None or (value.isascii() and "\x00" not in value):
            continue
        try:
            value.encode()
            bad = "\x00" in value
        except UnicodeEncodeError:
            bad = True
        if bad:
            raise StoreError(
                f"{field} of {what} holds a NUL or half a surrogate pair: {value!r}.",
                hint="Put such text into a body; ids, kinds and keys are ordinary text.",
            )
