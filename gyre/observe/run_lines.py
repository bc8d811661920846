"""The line of a run in a list: its row in the directory of jobs, its summary, and what users call it.

Imports nothing of weight: `gyre ls` reads a thousand lines in less time than the store's own packages take to import.
Pure. This module must not know how a summary is made, nor how a store is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FORM = 3
"""Of a summary's keys (`gyre.observe.run_summary`): raised with every change of them, so that summaries of before are
made anew."""

NOT_THE_EXPERIMENT = ("name", "tags", "notes", "store", "observe", "python_path", "failover")
"""Keys of a spec in which two runs of one experiment may differ, beside the seed: what it is called, where it keeps its
files and who looks at it."""

LISTED = 5000
"""Most jobs of a list, the newest: more than a table is read for, and a second's work to send."""


def line_of(
    summary: Mapping[str, Any],
    *,
    job_id: str,
    name: str,
    phase: str,
    reason: str,
    message: str,
    epoch: int,
    created_at: float,
    ended_at: float | None,
    url: str | None,
    tags: Sequence[str],
    notes: str,
) -> dict[str, Any]:
    """The item of a list, as `JobReader.jobs` gives it; its `queue_place` is that of a job that waits for nothing."""
    return {
        "job_id": job_id,
        "name": name,
        "phase": phase,
        "reason": reason,
        "epoch": epoch,
        "submitted_at": created_at,
        "ended_at": ended_at,
        "live": ended_at is None,
        "url": url or "",
        "queue_place": None,
        **summary,
        "message": summary["message"] or message,
        "tags": list(tags),
        "notes": notes,
    }


def ran_for(item: Mapping[str, Any], now: float) -> float:
    """Seconds of the last run of a list's item: since it was submitted or went on, until its end or `now`."""
    return max(float(item.get("ended_at") or now) - float(item.get("ran_since") or item["submitted_at"]), 0.0)
