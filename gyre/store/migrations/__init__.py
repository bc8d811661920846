"""The store's schema over time: Alembic's environment, read by `gyre.store.database` and by no one else."""
