"""Statements that are made once and run thousands of times a minute: SQLite's by its own driver.

What SQLAlchemy does around a small statement takes several times as long as SQLite does, and clients of the rollout
manager wait for it (`bench/results/door.md`). The transaction is SQLAlchemy's, and so is everything on PostgreSQL,
whose round trips take longer than either.

This module must not know what the statements do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import sqlite


class Prepared:
    """One statement with named parameters. Raises what the driver or SQLAlchemy raise."""

    def __init__(self, statement: Executable) -> None:
        self._statement = statement
        compiled: Any = statement.compile(dialect=sqlite.dialect(paramstyle="qmark"))  # type: ignore[attr-defined]
        self._sql = str(compiled)
        self._names: Sequence[str] = compiled.positiontup

    def run(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Run it for each row of parameters. Returns how many of the table's rows it has changed."""
        driver = connection.connection.driver_connection
        if not isinstance(driver, sqlite3.Connection):
            parameters: Any = dict(rows[0]) if len(rows) == 1 else [dict(row) for row in rows]
            return connection.execute(self._statement, parameters).rowcount
        values = [tuple(row[name] for name in self._names) for row in rows]
        if len(values) == 1:
            return driver.execute(self._sql, values[0]).rowcount
        return driver.executemany(self._sql, values).rowcount
