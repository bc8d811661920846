"""The rollout plane's own journal: open groups, and the packed token deltas of their samples.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gyre_rollouts",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("counters", sa.Text, nullable=False),
    )
    op.create_table(
        "gyre_rollout_groups",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("ticket", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "gyre_rollout_deltas",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    for table in ("gyre_rollout_deltas", "gyre_rollout_groups", "gyre_rollouts"):
        op.drop_table(table)
