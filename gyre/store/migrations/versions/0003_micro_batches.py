"""The sample ledger: what each micro-batch was made of, and groups that were given up or generated anew.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
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


def downgrade() -> None:
    for table in ("gyre_ledger_discards", "gyre_ledger_micro_batches"):
        op.drop_table(table)
