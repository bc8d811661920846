"""Suspicions: which vertices are stuck, judged by what they report. Pure.

A vertex reports at least every `report_interval_s`. Two things make it suspect: *silence* (no report for
`silence_timeout_s`: a stopped process, a dead node, a partition) and a *stall* (reports come, but the call that
it is in has made no progress for the role's `stall_timeout_s`). Liveness alone proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.config import JobSpec
from gyre.failover.state import Cause


@dataclass(frozen=True, slots=True)
class Observation:
    """The last report of a vertex. Times are of one monotonic clock, in seconds.

    `progressed_at` is when `ticks` last moved or a call last began or ended, whichever was later.
    """

    vertex: str
    role: str
    incarnation: int
    heard_at: float
    busy: str = ""
    """The operator that the vertex is running; empty when idle."""
    ticks: int = 0
    progressed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Suspicion:
    vertex: str
    incarnation: int
    cause: Cause
    after_s: float
    detail: str


def diagnose(observations: Mapping[str, Observation], spec: JobSpec, now: float) -> list[Suspicion]:
    """Returns which vertices are stuck at `now`, the longest first."""
    found = []
    for seen in observations.values():
        role = spec.roles[seen.role]
        quiet_s = now - seen.heard_at
        if quiet_s > spec.failover.silence_timeout_s:
            found.append(
                Suspicion(
                    seen.vertex,
                    seen.incarnation,
                    Cause.SILENT,
                    quiet_s,
                    f"no report for {quiet_s:.1f} s (limit {spec.failover.silence_timeout_s:g} s)",
                )
            )
            continue
        still_s = now - seen.progressed_at
        if seen.busy and still_s > role.stall_timeout_s:
            found.append(
                Suspicion(
                    seen.vertex,
                    seen.incarnation,
                    Cause.STALLED,
                    still_s,
                    f"{seen.busy} made no progress for {still_s:.1f} s (limit {role.stall_timeout_s:g} s)",
                )
            )
    return sorted(found, key=lambda suspicion: -suspicion.after_s)
