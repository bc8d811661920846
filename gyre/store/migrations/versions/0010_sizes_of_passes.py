"""How large a learner's passes are, from which step on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gyre_ledger_passes",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("from_step", sa.BigInteger, nullable=False),
        sa.Column("halved", sa.Integer, nullable=False),
        sa.Column("size", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("gyre_ledger_passes")
