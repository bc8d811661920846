"""What a job has cost so far: pure, of its record, so that the master, a page without one and a terminal say the same.

What its roles reserve costs from the moment at which they are there until the job ends: also while it starts, pauses
and recovers, for its machines are paid then, too. Between two runs of a job that goes on nothing is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOUR_S = 3600.0


def cost_of(job: Mapping[str, Any], now: float) -> float:
    """In the currency of the job's prices, until `now` (seconds since 1970) or its end; 0 where it has none. `job` has
    the fields of `JobRecord`, or those of a view's job."""
    until = min(now, job.get("ended_at") or now)
    hours = max(until - (job.get("priced_at") or until), 0.0) / HOUR_S
    return float(job.get("spent") or 0.0) + float(job.get("price_per_hour") or 0.0) * hours


def has_prices(job: Mapping[str, Any]) -> bool:
    return bool(job.get("priced_at"))
