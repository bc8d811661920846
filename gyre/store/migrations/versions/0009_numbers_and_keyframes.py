"""The numbers of a job over time, the keyframes of its journal, and an index of the events from which on another spec
was in force."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gyre_series",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("resolution_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "gyre_keyframes",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("after", sa.BigInteger, nullable=False),
        sa.Column("latest", sa.Float, nullable=False),
        sa.Column("form", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("decisions", sa.Text, nullable=False),
        sa.Column("chapter", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    continued = sa.text("kind = 'JobContinued'")
    op.create_index(
        "gyre_events_continued",
        "gyre_events",
        ["job_id", "seq"],
        sqlite_where=continued,
        postgresql_where=continued,
    )


def downgrade() -> None:
    op.drop_index("gyre_events_continued", "gyre_events")
    op.drop_table("gyre_keyframes")
    op.drop_table("gyre_series")
