"""Suspicions: which vertices are stuck, judged by what they report. Pure.

A vertex reports at least every `report_interval_s`. Two things make it suspect: *silence* (no report for
`silence_timeout_s`: a stopped process, a dead node, a partition) and a *stall* (reports come, but the call that
it is in has made no progress for the role's `stall_timeout_s`). Liveness alone proves nothing.

Silence is not death: a call into C that keeps the interpreter's lock silences every thread of a process that is well.
So before anybody is restarted because of it:
- *who stood still heard nobody*: time for which the observer itself did not run is no silence (`forgiven`);
- *only who is stopped or dead is lost at once*: a process that works, or that the machine does not let work, is left
  alone, and so is one that does nothing, for it may wait inside a call: for at most the role's `stall_timeout_s`, as
  any call that makes no progress (`is_left_alone`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gyre.config import JobSpec
from gyre.failover.state import Cause
from gyre.process_activity import ProcessLife


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


def forgiven(seen: Observation, late_s: float, now: float) -> Observation:
    """The observation, after the observer itself stood still for `late_s` up to `now` and could hear nobody."""
    return replace(
        seen,
        heard_at=min(now, seen.heard_at + late_s),
        progressed_at=min(now, seen.progressed_at + late_s),
    )


def is_left_alone(suspicion: Suspicion, life: ProcessLife, spec: JobSpec) -> bool:
    """Whether a silent process is given more time. Whether one that does nothing is in a call cannot be asked: its last
    report may be from before the call."""
    stall_timeout_s = spec.roles[suspicion.vertex.rpartition("-")[0]].stall_timeout_s
    return life in (ProcessLife.BUSY, ProcessLife.HUNG) and suspicion.after_s <= stall_timeout_s


def silent_together(silent: int, watched: int, machine: str) -> str:
    """The sentence about several vertices of one machine that are silent at once; "" for one alone."""
    if silent < 2:
        return ""
    return f"{silent} of {watched} vertices on {machine} are silent at once: the machine is busy or cut off"


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
