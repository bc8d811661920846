"""The points of a store's writes at which a process can die, for tests that do something there.

A point is named after the method that opened the transaction: `Journal.append_encoded.begun`, `.before_commit`,
`.after_commit`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa

from gyre.store import Store
from gyre.store.database import Database

BEGUN, BEFORE_COMMIT, AFTER_COMMIT = (
    f"Journal.append_encoded.{when}" for when in ("begun", "before_commit", "after_commit")
)
"""The points of an append to a journal."""


def at_points(store: Store, act: Callable[[str], object]) -> None:
    """From now on, calls `act` at every point of the store's writes, in the thread that writes, and nobody else."""
    database = store._database

    def write(*, relaxed: bool = False) -> AbstractContextManager[sa.Connection]:
        return _watched(database, sys._getframe(1).f_code.co_qualname, relaxed, act)

    database.write = write  # type: ignore[method-assign]


@contextlib.contextmanager
def _watched(
    database: Database, name: str, relaxed: bool, act: Callable[[str], object]
) -> Iterator[sa.Connection]:
    with Database.write(database, relaxed=relaxed) as connection:
        act(f"{name}.begun")
        yield connection
        act(f"{name}.before_commit")
    act(f"{name}.after_commit")


def after_writing(store: Store, table: sa.Table, act: Callable[[], object]) -> None:
    """From now on, calls `act` after every statement that changes rows of `table`."""
    starts = tuple(f"{verb} {table.name}" for verb in ("INSERT INTO", "UPDATE", "DELETE FROM"))

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(starts):
            act()

    sa.event.listen(store._database._engine, "after_cursor_execute", executed)
