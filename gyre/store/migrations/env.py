"""Alembic's environment, run from code: no alembic.ini, no logging set-up, no connection of its own.

Invariants:
    One-transaction    a migration runs on the caller's connection, inside the caller's transaction, which
                       already holds the lock that keeps other processes out; it never commits by itself.
    Offline-safe       `alembic upgrade --sql` (no connection at all) writes the same statements.
"""

from __future__ import annotations

from alembic import context

from gyre.store.tables import VERSION_TABLE, metadata


def _run_online() -> None:
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=metadata, version_table=VERSION_TABLE)
    with context.begin_transaction():
        context.run_migrations()


def _run_offline() -> None:
    context.configure(
        url=context.config.get_main_option("sqlalchemy.url"),
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    _run_offline()
else:
    _run_online()
