"""The store's schema over time: Alembic's environment, read by `gyre.store.engine` and by no one else."""
