"""Terms: a number that only grows and names the one writer of a job's rows.

This file must not know what the rows hold.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, select, text


def raise_term(connection: Connection, table: Table, job_id: str, term: int, **first: Any) -> int:
    """Set the job's `term` in `table`, which has one row for each job, unless a greater one is stored; a new row begins
    with `first`. Returns the stored term: if it is not `term`, a newer writer has taken over."""
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
