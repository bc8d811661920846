"""The directory of jobs: which jobs wait for room that others hold, since when, and when they last said so.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gyre_jobs", sa.Column("queued_since", sa.Float))
    op.add_column("gyre_jobs", sa.Column("queued_at", sa.Float))


def downgrade() -> None:
    op.drop_column("gyre_jobs", "queued_at")
    op.drop_column("gyre_jobs", "queued_since")
