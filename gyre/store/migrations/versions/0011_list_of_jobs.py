"""What users call a job by, and what a list shows of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gyre_job_labels",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("tags", sa.Text, nullable=False),
        sa.Column("notes", sa.Text, nullable=False),
    )
    op.create_table(
        "gyre_job_summaries",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("form", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("gyre_job_summaries")
    op.drop_table("gyre_job_labels")
