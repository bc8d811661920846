"""The sample ledger: the data that a job's prompts are drawn from.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gyre_ledgers", sa.Column("data", sa.Text))


def downgrade() -> None:
    op.drop_column("gyre_ledgers", "data")
