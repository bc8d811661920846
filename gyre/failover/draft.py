"""A state under change: copies a table only when it is first written, and knows which rows changed.

A decision reads and writes a draft; the state that it started from stays as it was.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from gyre.config import JOIN_TOKEN
from gyre.failover.evaluation import Evaluation
from gyre.failover.state import (
    TRAINING,
    VERTEX_TRANSITIONS,
    Incident,
    JobRecord,
    JobState,
    JoinToken,
    LearningWarning,
    MachineRecord,
    Reason,
    RowKey,
    TrainingRecord,
    VertexPhase,
    VertexRecord,
    record_at,
)


class InvariantBroken(AssertionError):
    """The control plane's own rules were about to be broken: a defect in Gyre, never a user's mistake."""


class Draft:
    def __init__(self, state: JobState) -> None:
        self.job: JobRecord = state.job
        self.vertices: dict[str, VertexRecord] = state.vertices
        self.incidents: dict[str, Incident] = state.incidents
        self.uses: dict[str, tuple[float, ...]] = state.uses
        self.machines: dict[str, MachineRecord] = state.machines
        self.tokens: dict[str, JoinToken] = state.tokens
        self.attempts: dict[str, int] = state.attempts
        self.evaluations: dict[str, Evaluation] = state.evaluations
        self.warnings: dict[str, LearningWarning] = state.warnings
        self.training: TrainingRecord = state.training
        self.moved = False
        """True once a vertex came, went, changed its phase or began to wait for room."""
        self._before = state
        self._written: set[RowKey] = set()
        self._own: set[str] = set()

    def set_job(self, **fields: Any) -> None:
        self.job = replace(self.job, **fields)
        self._written.add(("job", "job"))

    def add_vertex(self, record: VertexRecord) -> None:
        self.moved = True
        self._put_vertex(record)

    def set_vertex(self, vertex: str, **fields: Any) -> VertexRecord:
        """Change fields other than the phase; `move` changes the phase."""
        record = replace(self.vertices[vertex], **fields)
        self._put_vertex(record)
        return record

    def move(
        self, vertex: str, to: VertexPhase, now: float, *, reason: Reason, message: str = "", **fields: Any
    ) -> VertexRecord:
        """Change a vertex's phase along the transition table. Raises InvariantBroken off the table."""
        before = self.vertices[vertex]
        if (before.phase, to) not in VERTEX_TRANSITIONS:
            raise InvariantBroken(
                f"{vertex} cannot go from {before.phase} to {to} (incarnation {before.incarnation}, reason {reason})"
            )
        self.moved = True
        return self.set_vertex(
            vertex,
            phase=to,
            since=now,
            reason=reason,
            message=message,
            no_room="",
            no_room_since=0.0,
            silent="",
            silent_since=0.0,
            **fields,
        )

    def wait_for_room(self, vertex: str, now: float, lacks: str) -> bool:
        """Note that the vertex, which is STARTING, waits for room. Returns whether it waited before."""
        before = self.vertices[vertex]
        self.moved = True
        self.set_vertex(vertex, no_room=lacks, no_room_since=before.no_room_since or now)
        return bool(before.no_room)

    def found_room(self, vertex: str) -> None:
        self.moved = True
        self.set_vertex(vertex, no_room="", no_room_since=0.0)

    def set_incident(self, incident: Incident) -> None:
        self._own_table("incidents")
        self.incidents[incident.id] = incident
        self._written.add(("incident", incident.id))

    def remove_incident(self, incident: str) -> None:
        self._own_table("incidents")
        del self.incidents[incident]
        self._written.add(("incident", incident))

    def set_uses(self, key: str, uses: tuple[float, ...]) -> None:
        self._own_table("uses")
        self.uses[key] = uses
        self._written.add(("budget", key))

    def set_machine(self, machine: str, **fields: Any) -> None:
        self._own_table("machines")
        self.machines[machine] = replace(self.machines.get(machine) or MachineRecord(machine), **fields)
        self._written.add(("machine", machine))

    def set_token(self, token: JoinToken) -> None:
        self._own_table("tokens")
        self.tokens[token.name] = token
        self._written.add((JOIN_TOKEN, token.name))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self._own_table("evaluations")
        self.evaluations[evaluation.key] = evaluation
        self._written.add(("evaluation", evaluation.key))

    def remove_evaluation(self, evaluation: str) -> None:
        self._own_table("evaluations")
        del self.evaluations[evaluation]
        self._written.add(("evaluation", evaluation))

    def set_warning(self, warning: LearningWarning) -> None:
        self._own_table("warnings")
        self.warnings[warning.code] = warning
        self._written.add(("warning", warning.code))

    def set_training(self, **fields: Any) -> None:
        self.training = replace(self.training, **fields)
        self._written.add((TRAINING, TRAINING))

    def set_attempts(self, key: str, attempts: int) -> None:
        """Change the number of uses without progress of a budget that has uses."""
        self._own_table("attempts")
        if attempts:
            self.attempts[key] = attempts
        else:
            self.attempts.pop(key, None)
        self._written.add(("budget", key))

    def done(self) -> JobState:
        return JobState(**{one.name: getattr(self, one.name) for one in fields(JobState)})

    def changed(self) -> frozenset[RowKey]:
        """Returns the keys of the rows that differ from the state at the start."""
        return frozenset(
            key for key in self._written if self._record(self._before, key) != self._record(self, key)
        )

    @staticmethod
    def _record(of: JobState | Draft, key: RowKey) -> object:
        kind, name = key
        return (of.uses.get(name), of.attempts.get(name)) if kind == "budget" else record_at(of, key)

    def _put_vertex(self, record: VertexRecord) -> None:
        self._own_table("vertices")
        self.vertices[record.id] = record
        self._written.add(("vertex", record.id))

    def _own_table(self, name: str) -> None:
        if name not in self._own:
            setattr(self, name, dict(getattr(self, name)))
            self._own.add(name)
