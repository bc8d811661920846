"""The line of a run in a list: its row in the directory of jobs, its summary, and what users call it.

Imports nothing of weight: `gyre ls` reads a thousand lines in less time than the store's own packages take to import.
Pure. This module must not know how a summary is made, nor how a store is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FORM = 3
"""Of the fields of `RunSummary`: raised with every change of them, so that summaries of before are
made anew."""

NOT_THE_EXPERIMENT = ("name", "tags", "notes", "store", "observe", "python_path", "failover")
"""Keys of a spec in which two runs of one experiment may differ, beside the seed: what it is called, where it keeps its
files and who looks at it."""

LISTED = 5000
"""Most jobs of a list, the newest: more than a table is read for, and a second's work to send."""


POINTS = 40
"""Steps of which the rewards are kept: as many as a curve in a line of a table can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The best evaluation of a held-out set, and the policy version that earned it; `last` is the newest one, of
    `last_version`. `unit`: `accuracy`, or `reward` where there is no accuracy. `right_by` and `components` as in an
    evaluation."""

    set: str
    unit: Literal["accuracy", "reward"]
    value: float
    version: int
    right_by: str = ""
    components: dict[str, float] = field(default_factory=dict)
    last: float | None = None
    last_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a list shows of a run, which the store keeps. None is what is not known."""

    step: int
    version: int
    started_at: float | None = None
    message: str = ""
    ran_since: float | None = None
    """When its last run began, in seconds since 1970: when it was submitted, or went on after an end."""
    steps: int | None = None
    """Those asked for; null where the user's own trainer says."""
    recipe: str = ""
    """"" for a user's own trainer."""
    model: str = ""
    """The last part of its folder, or the small decoder's shape, or ""."""
    seed: int | None = None
    config: str = ""
    """Equal for jobs that differ in their seed alone."""
    reward: float | None = None
    """Of the last step."""
    rewards: list[float | None] = field(default_factory=list)
    """Of at most `POINTS` steps, evenly spread."""
    held_out: list[HeldOut] = field(default_factory=list)
    """The best of each set, in the order of their names."""
    tokens_per_s: float | None = None
    """The median of those steps without the first one of a run, which has the engines' start in it."""
    cost: float | None = None
    """What the run cost until its end, or so far, in the currency of its prices; null where it has none."""


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
