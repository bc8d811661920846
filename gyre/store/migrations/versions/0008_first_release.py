"""The store's identity, the directory of jobs, the journal with its snapshot and outbox, the sample ledger, and the
rollout plane's own journal.

Revises nothing. A released revision is never changed: it spells the tables out instead of importing them.
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None


def _partial(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )


def upgrade() -> None:
    table = op.create_table(
        "gyre_store",
        sa.Column("store_id", sa.Text, primary_key=True),
        sa.Column("commits", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.bulk_insert(table, [{"store_id": uuid.uuid4().hex, "commits": 0}])
    op.create_table(
        "gyre_jobs",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("ray_address", sa.Text),
        sa.Column("namespace", sa.Text),
        sa.Column("master_pid", sa.Integer),
        sa.Column("url", sa.Text),
        sa.Column("token_hint", sa.Text),
        sa.Column("queued_since", sa.Float),
        sa.Column("queued_at", sa.Float),
    )
    _partial("gyre_jobs_one_live_name", "gyre_jobs", ["name"], "ended_at IS NULL", unique=True)
    op.create_index("gyre_jobs_by_age", "gyre_jobs", ["created_at"])
    op.create_table(
        "gyre_journals",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("taken_at", sa.Float),
    )
    op.create_table(
        "gyre_events",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("cause", sa.Text),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.UniqueConstraint("job_id", "event_id", name="gyre_events_said_once"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "gyre_snapshot",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "gyre_outbox",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("command_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("done_seq", sa.BigInteger),
        sqlite_with_rowid=False,
    )
    _partial("gyre_outbox_pending", "gyre_outbox", ["job_id", "seq", "position"], "done_seq IS NULL")
    op.create_table(
        "gyre_ledgers",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("cursor", sa.BigInteger, nullable=False),
        sa.Column("data", sa.Text),
    )
    op.create_table(
        "gyre_ledger_groups",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("group_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("version_min", sa.BigInteger),
        sa.Column("version_max", sa.BigInteger),
        sa.Column("payload", sa.LargeBinary),
    )
    _partial("gyre_ledger_groups_open", "gyre_ledger_groups", ["job_id", "group_id"], "status <> 'trained'")
    _partial("gyre_ledger_groups_trained", "gyre_ledger_groups", ["job_id", "step"], "status = 'trained'")
    op.create_table(
        "gyre_ledger_steps",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger),
        sa.Column("digest", sa.Text),
        sa.Column("group_ids", sa.Text, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_table(
        "gyre_ledger_checkpoints",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_table(
        "gyre_ledger_micro_batches",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("shares", sa.Text, nullable=False),
        sa.Column("last", sa.Integer, nullable=False),
    )
    op.create_table(
        "gyre_ledger_discards",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("group_id", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("replaced_by", sa.BigInteger),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_table(
        "gyre_ledger_restores",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("gang", sa.BigInteger, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("checkpoint_step", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("seconds", sa.Float),
    )
    op.create_table(
        "gyre_rollouts",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("counters", sa.Text, nullable=False),
    )
    op.create_table(
        "gyre_rollout_groups",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("request_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "gyre_rollout_deltas",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    for table in (
        "gyre_rollout_deltas",
        "gyre_rollout_groups",
        "gyre_rollouts",
        "gyre_ledger_restores",
        "gyre_ledger_discards",
        "gyre_ledger_micro_batches",
        "gyre_ledger_checkpoints",
        "gyre_ledger_steps",
        "gyre_ledger_groups",
        "gyre_ledgers",
        "gyre_outbox",
        "gyre_snapshot",
        "gyre_events",
        "gyre_journals",
        "gyre_jobs",
        "gyre_store",
    ):
        op.drop_table(table)
