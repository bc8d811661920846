"""Becoming the one writer of a job's rows, in one statement: a term that only grows.

This file must not know what the rows hold.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, select, text


def raise_term(connection: Connection, table: Table, job_id: str, term: int, **first: Any) -> int:
    """Set the job's `term` in `table`, a row a job, where the stored one is not greater; a row that is not there yet
    begins with `first`. The term that is stored then: another than `term` says that somebody newer writes."""
    columns = ("job_id", "term", *first)
    connection.execute(
        text(
            f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)}) "
            "ON CONFLICT (job_id) DO UPDATE SET term = excluded.term "
            f"WHERE {table.name}.term < excluded.term"
        ),
        {"job_id": job_id, "term": term, **first},
    )
    return int(connection.execute(select(table.c.term).where(table.c.job_id == job_id)).scalar_one())
