"""The sample ledger: where gangs that could not go on from where they stood had their state from.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
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


def downgrade() -> None:
    op.drop_table("gyre_ledger_restores")
