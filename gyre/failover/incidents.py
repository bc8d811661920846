"""Incidents: each fault is recorded with its evidence, the decision about it and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gyre.failover.draft import Draft
from gyre.failover.state import Cause, Incident, Scope, VertexPhase, VertexRecord
from gyre.failover.vertices import is_wanted

KEPT_INCIDENTS = 200
"""Number of closed incidents kept in the snapshot; older ones are still in the events."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong with a vertex, as the event about it says."""

    cause: Cause
    evidence: dict[str, Any]
    user_code: bool = False
    detected_after_s: float | None = None
    generated: bool = False
    """See `VertexLost`."""


def open_incident(
    draft: Draft,
    record: VertexRecord,
    now: float,
    fault: Fault,
    *,
    scope: Scope,
    decision: str,
    region: tuple[str, ...] = (),
    recovered: bool = False,
    outcome: str = "open",
) -> None:
    """Record the fault and what was decided. An incident that needs no waiting is `recovered`, or has its `outcome`,
    from the start."""
    identity = f"{record.id}/{record.incarnation}/{scope.value}"
    known = [key for key in draft.incidents if key == identity or key.startswith(f"{identity}/")]
    number = 1 + max((int(key[len(identity) + 1 :] or 0) for key in known), default=-1)
    draft.set_incident(
        Incident(
            id=f"{identity}/{number}" if number else identity,
            at=now,
            vertex=record.id,
            incarnation=record.incarnation,
            cause=fault.cause.value,
            scope=scope,
            decision=decision,
            evidence=fault.evidence,
            user_code=fault.user_code,
            region=region,
            detected_after_s=fault.detected_after_s,
            recovered_at=now if recovered else None,
            outcome="recovered" if recovered else outcome,
        )
    )
    closed = [incident for incident in draft.incidents.values() if incident.outcome != "open"]
    # Sorted by time, not by place in the table: a state loaded from rows holds the incidents in another order.
    closed.sort(key=lambda incident: (incident.at, incident.id))
    for incident in closed[: max(0, len(closed) - KEPT_INCIDENTS)]:
        draft.remove_incident(incident.id)


def close_incidents(draft: Draft, now: float) -> None:
    """Close every open incident whose repair is over: all vertices of its region that are still wanted run."""
    for incident in list(draft.incidents.values()):
        if incident.outcome != "open":
            continue
        members = [draft.vertices[vertex] for vertex in incident.region if is_wanted(draft, vertex)]
        if not members:
            draft.set_incident(replace(incident, outcome="scaled away"))
        elif incident.cause in (Cause.ENGINE_DIED, Cause.ENGINE_START_FAILED, Cause.POLICY_NOT_SERVED):
            continue  # its vertex runs all the time; the engine's start, or the version's service, closes it
        elif all(vertex.phase is VertexPhase.RUNNING for vertex in members):
            draft.set_incident(replace(incident, recovered_at=now, outcome="recovered"))
