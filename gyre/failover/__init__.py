"""Failover: events, state, and the pure decisions between them."""

from gyre.failover.coordinator import Decision, FailoverCoordinator
from gyre.failover.folding import Difference, differences, fold
from gyre.failover.stall import Stall, StepWatch
from gyre.failover.state import (
    Cause,
    Incident,
    JobPhase,
    JobRecord,
    JobState,
    JoinToken,
    MachineRecord,
    Reason,
    Scope,
    VertexPhase,
    VertexRecord,
    row_of,
    rows_of,
    state_from,
)
from gyre.failover.suspicions import (
    Observation,
    Suspicion,
    diagnose,
    forgiven,
    is_left_alone,
    silent_together,
)

__all__ = [
    "Cause",
    "Decision",
    "Difference",
    "FailoverCoordinator",
    "Incident",
    "JobPhase",
    "JobRecord",
    "JobState",
    "JoinToken",
    "MachineRecord",
    "Observation",
    "Reason",
    "Scope",
    "Stall",
    "StepWatch",
    "Suspicion",
    "VertexPhase",
    "VertexRecord",
    "diagnose",
    "differences",
    "fold",
    "forgiven",
    "is_left_alone",
    "row_of",
    "rows_of",
    "silent_together",
    "state_from",
]
