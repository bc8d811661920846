"""The store's identity, and how often it was committed to: by them a copy that was put in its place is known.

Revision ID: 0007
Revises: 0006
"""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "gyre_store",
        sa.Column("store_id", sa.Text, primary_key=True),
        sa.Column("commits", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.bulk_insert(table, [{"store_id": uuid.uuid4().hex, "commits": 0}])


def downgrade() -> None:
    op.drop_table("gyre_store")
