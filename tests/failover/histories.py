"""Driving decisions by hand: a history that checks the invariants as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gyre.config import Budget, JobSpec
from gyre.failover import Decision, FailoverCoordinator, Incident, JobState, VertexPhase, VertexRecord
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.graph import compile_job
from tests.doubles.standing_job import small_spec
from tests.failover.witness import Witness


def spec_with(**budgets: Budget) -> JobSpec:
    """The small job, resolved, with some of its budgets changed."""
    spec = small_spec()
    for name, budget in budgets.items():
        setattr(spec.failover, name, budget)
    return compile_job(spec).spec


def coordinator_of(spec: JobSpec) -> FailoverCoordinator:
    return FailoverCoordinator(spec, compile_job(spec).graph.region_or_alone)


@dataclass(frozen=True, slots=True)
class Recorded:
    seq: int
    kind: str
    at: float
    body: dict[str, Any]


@dataclass
class History:
    """Decides events one second apart and remembers everything that came of them."""

    coordinator: FailoverCoordinator
    state: JobState = field(default_factory=JobState)
    now: float = 1000.0
    records: list[Recorded] = field(default_factory=list)
    commands: list[c.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.witness = Witness(self.coordinator.spec)

    def decide(self, event: e.Event, *, after_s: float = 1.0) -> Decision:
        self.now += after_s
        decision = self.coordinator.decide(self.state, event, self.now)
        self.witness.check(self.state, event, decision, self.now)
        self.state = decision.state
        self.records.append(Recorded(len(self.records) + 1, e.kind_of(event), self.now, e.body_of(event)))
        self.commands += decision.commands
        return decision

    def submit(self) -> History:
        roles = {name: role.total for name, role in self.coordinator.spec.roles.items()}
        self.decide(e.JobSubmitted("j1", self.coordinator.spec.name, roles))
        self.decide(e.MasterStarted(1, pid=10, node="n0", url="http://127.0.0.1:1"))
        return self

    def start_all(self) -> History:
        """Every vertex that is starting comes up."""
        for record in list(self.state.vertices.values()):
            if record.phase is VertexPhase.STARTING:
                self.start(record.id)
        return self

    def start(self, vertex: str) -> Decision:
        return self.decide(e.VertexStarted(vertex, self[vertex].incarnation, pid=7, node="n0"))

    def lose(self, vertex: str, cause: str = "process_died", **evidence: Any) -> Decision:
        return self.decide(e.VertexLost(vertex, self[vertex].incarnation, cause, evidence))

    def fail(self, vertex: str, fault: str, *, attempt: int = 0) -> None:
        """A fault of the vertex, which runs; then everything that starts comes up, but for what does not start."""
        if fault == "raises" and vertex == "trainer-0":
            self.report(e.TrainerFailed, error="no", traceback="", user_code=True)
        elif fault == "raises":
            self.fail_operator(vertex, user_code=True, attempt=attempt)
        elif fault == "dies" or self[vertex].phase is VertexPhase.RUNNING:
            self.lose(vertex)
        else:
            self.fail_start(vertex, user_code=fault == "raises in setup")
        for record in list(self.state.vertices.values()):
            starts = record.phase is VertexPhase.STARTING
            if starts and (record.id != vertex or fault in ("dies", "raises")):
                self.start(record.id)

    def fail_start(self, vertex: str, *, user_code: bool = False) -> Decision:
        return self.decide(
            e.VertexStartFailed(vertex, self[vertex].incarnation, error="no", user_code=user_code)
        )

    def step(self) -> Decision:
        step = self.state.job.step + 1
        return self.report(e.StepCompleted, step=step, version=step)

    def stop_all(self) -> History:
        """Every vertex that was told to stop is gone."""
        for record in list(self.state.vertices.values()):
            if record.phase is VertexPhase.STOPPING:
                self.decide(e.VertexStopped(record.id, record.incarnation))
        return self

    def fail_operator(
        self,
        vertex: str,
        *,
        user_code: bool = False,
        attempt: int = 0,
        code: str = "",
        error: str = "ValueError: no",
        **where: str,
    ) -> Decision:
        trainer = self["trainer-0"]
        return self.decide(
            e.OperatorFailed(
                incarnation=trainer.incarnation,
                vertex=vertex,
                vertex_incarnation=self[vertex].incarnation,
                operator="run",
                error=error,
                traceback="Traceback …",
                user_code=user_code,
                report=trainer.reported + 1,
                attempt=attempt,
                code=code,
                **where,
            )
        )

    def report(self, kind: Any, **fields: Any) -> Decision:
        trainer = self["trainer-0"]
        return self.decide(kind(incarnation=trainer.incarnation, report=trainer.reported + 1, **fields))

    def __getitem__(self, vertex: str) -> VertexRecord:
        return self.state.vertices[vertex]

    @property
    def incident(self) -> Incident:
        """The newest."""
        return max(self.state.incidents.values(), key=lambda incident: incident.at)
