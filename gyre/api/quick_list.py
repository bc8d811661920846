"""The list of jobs that have ended, read from SQLite alone: what `gyre ls` shows most of the time.

A thousand lines are read in some ten milliseconds; to import what opens a store takes a core half a second.

Invariant: *all or nothing*: it lists only where every line can be had as `JobReader.jobs` would give it, with nothing
left to find out; in any doubt (a job that runs, a summary that is missing or behind, another schema, another database)
it says nothing, and the reader does it.

This module must not import SQLAlchemy, pydantic or anything that does.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import gyre
from gyre.observe.run_lines import FORM, line_of

BUSY_S = 1.0
"""A writer holds the file for milliseconds; the reader has patience of its own."""

_QUERY = """
SELECT j.job_id, j.name, j.phase, j.reason, j.message, o.epoch, j.created_at, j.ended_at, j.url,
       l.tags, l.notes, s.body
FROM gyre_jobs j JOIN gyre_journals o ON o.job_id = j.job_id
LEFT JOIN gyre_job_labels l ON l.job_id = j.job_id
LEFT JOIN gyre_job_summaries s ON s.job_id = j.job_id AND s.seq = o.last_seq AND s.form = ?
WHERE j.ended_at IS NOT NULL
ORDER BY j.created_at DESC, j.job_id DESC LIMIT ?
"""


def ended_jobs(store_url: str, limit: int) -> list[dict[str, Any]] | None:
    """The items of the newest `limit` jobs, as `JobReader.jobs` gives them, if all of the store have ended; None where
    the reader has to be asked."""
    scheme, separator, path = store_url.partition(":///")
    file = unquote(path.partition("?")[0])
    if not separator or not scheme.startswith("sqlite") or not file:
        return None
    try:
        with closing(sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            connection.execute("BEGIN")  # one state of it throughout
            revision = connection.execute("SELECT version_num FROM gyre_schema").fetchone()
            if revision is None or revision[0] != _newest_revision():
                return None
            if connection.execute("SELECT 1 FROM gyre_jobs WHERE ended_at IS NULL").fetchone():
                return None
            rows = connection.execute(_QUERY, (FORM, limit)).fetchall()
        if any(row[-1] is None for row in rows):
            return None
        return [_item(*row) for row in rows]
    except (sqlite3.Error, ValueError, KeyError, TypeError, OSError):
        return None  # the reader finds out what it is, and says it in a sentence


def _item(
    job_id: str,
    name: str,
    phase: str,
    reason: str,
    message: str,
    epoch: int,
    created_at: float,
    ended_at: float,
    url: str | None,
    tags: str | None,
    notes: str | None,
    body: str,
) -> dict[str, Any]:
    return line_of(
        json.loads(body),
        job_id=job_id,
        name=name,
        phase=phase,
        reason=reason,
        message=message,
        epoch=epoch,
        created_at=created_at,
        ended_at=ended_at,
        url=url,
        tags=json.loads(tags) if tags is not None else (),
        notes=notes or "",
    )


def _newest_revision() -> str:
    """The revision that this code reads, which `gyre.store.tables.HEAD` names."""
    folder = Path(gyre.__file__).parent / "store/migrations/versions"
    return max(path.name[:4] for path in folder.glob("[0-9]*.py"))
