"""A simulation of a job under faults, in virtual time: the master's coordinator over a model of everything else.

    result = simulate(spec, seed=1, faults=random_faults(...), steps=1000)

The model is a queue of future events (a process comes up, a step ends, a fault strikes, news arrive) and a few rules
for vertices. Nothing sleeps and nothing is placed, so thousands of faults take seconds. The coordinator's invariants
are checked at every decision.

The whole master runs in virtual time too (`gyre.testing.fake_cluster`), with its event loop and its journal. It handles
some 250 events in a second of CPU time, this model some 8,500: the former shows what the master does, the latter what
its decisions lead to over a long history.

Invariants:
- *repeatable*: equal arguments give an equal result;
- *one incarnation lives*: the model refuses to start a vertex beside another incarnation of it;
- *the journal is enough*: whenever the master dies, its successor has only the snapshot's rows.

This module must not know the master, Ray or asyncio.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gyre.config import TRAINER, JobSpec
from gyre.failover import (
    Cause,
    Decision,
    FailoverCoordinator,
    JobPhase,
    JobState,
    VertexPhase,
    rows_of,
    state_from,
)
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import InvariantBroken
from gyre.graph import compile_job
from gyre.sim.fault_trace import MASTER, Fault, FaultKind
from gyre.sim.invariants import Witness

TRAINER_0 = f"{TRAINER}-0"


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds; ranges are drawn from evenly."""

    start_s: tuple[float, float] = (0.5, 3.0)
    """Time from a start command to the return of `setup()`."""
    step_s: tuple[float, float] = (1.0, 2.0)
    notice_death_s: float = 0.05
    stop_s: float = 0.2
    look_for_room_s: float = 2.0
    """How often a start that waits looks for room."""
    master_away_s: tuple[float, float] = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Faults of the delivery of news to the coordinator."""

    delay_s: float = 0.0
    """Largest delay, drawn for each, so that news overtake each other."""
    duplicate: float = 0.0
    """Share of news that come twice."""


@dataclass(frozen=True, slots=True)
class Decided:
    """An event as it was decided, for `gyre.failover.fold`."""

    seq: int
    kind: str
    at: float
    body: dict[str, Any]


@dataclass(slots=True)
class SimResult:
    """The result of a simulated job."""

    phase: JobPhase = JobPhase.SUBMITTED
    message: str = ""
    virtual_s: float = 0.0
    """Virtual time from submission to the job's end."""
    steps: int = 0
    steps_lost: int = 0
    """Steps that a fault cut short and that were done again."""
    downtime_s: float = 0.0
    """Time without a running step after the trainer's first start, except pauses."""
    repairs: Counter[str] = field(default_factory=Counter)
    """Incidents by scope."""
    causes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Faults that struck something alive, by kind."""
    masters: int = 1
    events: int = 0
    commands: int = 0
    max_recovery_s: float = 0.0
    state: JobState = field(default_factory=JobState)
    history: list[Decided] = field(default_factory=list)
    transitions: set[tuple[VertexPhase, VertexPhase]] = field(default_factory=set)

    @property
    def goodput(self) -> float:
        """Share of the time since submission in which steps were under way."""
        return 1.0 - self.downtime_s / self.virtual_s if self.virtual_s else 0.0


def simulate(
    spec: JobSpec,
    *,
    seed: int,
    faults: Iterable[Fault] = (),
    steps: int,
    requests: Iterable[tuple[float, e.Event]] = (),
    timings: Timings | None = None,
    delivery: Delivery | None = None,
    limit_s: float = 1e7,
) -> SimResult:
    """Run a job of `steps` optimizer steps through its faults, to its end.

    `requests` are people's requests (scale, pause, stop), each with its time. Raises InvariantBroken at the first
    decision that breaks a rule, and if the job stalls or has not ended by `limit_s`.
    """
    model = _Model(spec, seed, steps, timings or Timings(), delivery or Delivery())
    for fault in faults:
        model.at(fault.at_s, model.strike, fault)
    for at_s, event in requests:
        model.at(at_s, model.ask, event)
    return model.run(limit_s)


@dataclass(slots=True)
class _Process:
    vertex: str
    incarnation: int
    alive: bool = True
    up: bool = False
    trouble: FaultKind | None = None

    @property
    def works(self) -> bool:
        return self.alive and self.up and self.trouble is None


class _Model:
    def __init__(self, spec: JobSpec, seed: int, steps: int, timings: Timings, delivery: Delivery) -> None:
        compiled = compile_job(spec)
        self.spec = compiled.spec
        self._coordinator = FailoverCoordinator(compiled.spec, compiled.graph.region_or_alone)
        self._witness = Witness(compiled.spec)
        self._draw = random.Random(seed)
        self._wanted_steps = steps
        self._timings = timings
        self._delivery = delivery
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.now = 0.0
        self.state = JobState()
        self.result = SimResult()
        # The cluster.
        self._processes: dict[str, _Process] = {}
        self._away: set[str] = set()
        self._waiting: set[tuple[str, int]] = set()
        """The incarnations that were told to wait for room."""
        self._fails_next: set[str] = set()
        # The master.
        self._epoch = 0
        self._outbox: dict[int, c.Command] = {}
        self._held: list[e.Event] = []
        """News that arrived while there was no master."""
        # The trainer.
        self._fit: int | None = None
        """The incarnation whose `fit()` runs."""
        self._serial = -1
        self._roster: dict[str, int] = {}
        self._roles: dict[str, int] = {}
        self._paused = self._stopping = False
        self._reports: list[e.Event] = []
        self._acknowledged = 0
        self._stepping = False
        self._attempt = 0
        self._raises: dict[str, int] = {}
        self._steps_done = 0
        """The sample ledger's last step, which outlives the trainer."""
        self._idle_since: float | None = None

    # -- the queue ----------------------------------------------------------------------------------

    def at(self, at_s: float, action: Callable[..., None], *args: Any) -> int:
        self._number += 1
        heapq.heappush(self._queue, (at_s, self._number, action, args))
        return self._number

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> int:
        return self.at(self.now + delay_s, action, *args)

    def run(self, limit_s: float) -> SimResult:
        roles = {role: spec.total for role, spec in self.spec.roles.items()}
        self._decide(e.JobSubmitted("sim", self.spec.name, roles))
        self._start_master()
        while not self.state.job.phase.ended:
            if not self._queue or self._queue[0][0] > limit_s:
                raise InvariantBroken(
                    f"every job ends: at {self.now:.1f} s the job is {self.state.job.phase}, "
                    f"{'nothing is left to happen' if not self._queue else 'the limit is reached'}; "
                    f"vertices {[(v.id, v.incarnation, v.phase.value) for v in self.state.vertices.values()]}"
                )
            self.now, _, action, args = heapq.heappop(self._queue)
            action(*args)
        return self._summary()

    def _summary(self) -> SimResult:
        result, job = self.result, self.state.job
        self._idle(False)
        result.phase, result.message, result.steps = job.phase, job.message, job.step
        result.virtual_s = self.now
        result.state = self.state
        result.transitions = self._witness.transitions
        left = [process for process in self._processes.values() if process.alive]
        if left:
            raise InvariantBroken(f"nothing outlives its job: {left}")
        return result

    # -- the master ---------------------------------------------------------------------------------

    def ask(self, event: e.Event) -> None:
        self._arrive(event)

    def _tell(self, event: e.Event) -> None:
        """Send news to the master."""
        delivery = self._delivery
        self.after(self._draw.uniform(0, delivery.delay_s), self._arrive, event)
        if delivery.duplicate and self._draw.random() < delivery.duplicate:
            self.after(self._draw.uniform(0, 2 * delivery.delay_s), self._arrive, event)

    def _arrive(self, event: e.Event) -> None:
        if self._epoch < 0:
            self._held.append(event)
        else:
            self._decide(event)

    def _decide(self, event: e.Event) -> None:
        before = self.state
        decision: Decision = self._coordinator.decide(before, event, self.now)
        self._witness.check(before, event, decision, self.now)
        self.state = decision.state
        result = self.result
        result.events += 1
        result.history.append(Decided(result.events, e.kind_of(event), self.now, e.body_of(event)))
        result.commands += len(decision.commands)
        for kind, name in decision.changed:
            if kind == "incident" and name in self.state.incidents:
                incident = self.state.incidents[name]
                if name not in before.incidents:
                    result.repairs[incident.scope.value] += 1
                    result.causes[incident.cause] += 1
                if incident.recovery_s is not None:
                    result.max_recovery_s = max(result.max_recovery_s, incident.recovery_s)
        for command in decision.commands:
            self._number += 1
            self._outbox[self._number] = command
            self._carry_out(self._number, command)
        if isinstance(event, e.REPORTED):
            self._acknowledged = max(self._acknowledged, event.report)

    def _kill_master(self) -> None:
        if self._epoch < 0:
            return
        self.result.faults["master"] += 1
        self.result.masters += 1
        self._epoch = -abs(self._epoch)
        self.after(self._draw.uniform(*self._timings.master_away_s), self._start_master)

    def _start_master(self) -> None:
        self._epoch = abs(self._epoch) + 1
        rows = rows_of(self.state)
        self.state = state_from({key: rows[key] for key in sorted(rows)})
        self._decide(e.MasterStarted(self._epoch, pid=self._epoch, node="n0", rules=e.RULES))
        for number, command in list(self._outbox.items()):
            self._carry_out(number, command)
        held, self._held = self._held, []
        for event in held:
            self._decide(event)
        for record in list(self.state.vertices.values()):
            process = self._processes.get(record.id)
            if record.phase is VertexPhase.RUNNING and not self._lives(process, record.incarnation):
                self._tell(e.VertexLost(record.id, record.incarnation, Cause.DIED.value))
        for report in [r for r in self._reports if getattr(r, "report", 0) > self._acknowledged]:
            self._arrive(report)

    @staticmethod
    def _lives(process: _Process | None, incarnation: int) -> bool:
        return process is not None and process.alive and process.incarnation == incarnation

    # -- carrying commands out ----------------------------------------------------------------------

    def _carry_out(self, number: int, command: c.Command) -> None:
        match command:
            case c.StartRegion():
                self.at(max(self.now, command.not_before), self._start_region, number, self._epoch, command)
                return
            case c.StopVertex():
                self.after(self._timings.stop_s, self._stop_vertex, number, self._epoch, command)
                return
            case c.SetTimer():
                self.at(max(self.now, command.at), self._fire, number, self._epoch, command)
                return
            case c.StartTrainer():
                self._hear_roster(command.incarnation, command.serial, command.running, command.roles)
                if self._lives(self._processes.get(TRAINER_0), command.incarnation):
                    self._paused = command.paused
                    if self._fit != command.incarnation:
                        self._fit = command.incarnation
                        self._stopping = False
            case c.AnnounceRoster():
                self._hear_roster(command.trainer_incarnation, command.serial, command.running, command.roles)
            case c.PauseTrainer() if command.incarnation == self._fit:
                self._paused = True
            case c.ResumeTrainer() if command.incarnation == self._fit:
                self._paused = False
            case c.StopTrainer() if command.incarnation == self._fit:
                self._stopping = True
        self._outbox.pop(number, None)
        self._work()

    def _hear_roster(
        self, incarnation: int, serial: int, running: dict[str, int], roles: dict[str, int]
    ) -> None:
        if self._lives(self._processes.get(TRAINER_0), incarnation) and serial > self._serial:
            self._serial, self._roster, self._roles = serial, dict(running), dict(roles)

    def _done(self, number: int, epoch: int) -> bool:
        """Whether this attempt must not be made: its master is gone, or it was made already."""
        return epoch != self._epoch or self._outbox.pop(number, None) is None

    def _fire(self, number: int, epoch: int, command: c.SetTimer) -> None:
        if not self._done(number, epoch):
            self._tell(e.TimerFired(command.timer))

    def _stop_vertex(self, number: int, epoch: int, command: c.StopVertex) -> None:
        if not self._done(number, epoch):
            self._end_process(command.vertex, command.incarnation)
            self._tell(e.VertexStopped(command.vertex, command.incarnation))

    def _start_region(self, number: int, epoch: int, command: c.StartRegion) -> None:
        if epoch != self._epoch or number not in self._outbox:
            return
        for vertex, incarnation in command.replaces.items():
            self._end_process(vertex, incarnation)
        waiting = []
        for vertex, incarnation in command.vertices.items():
            record = self.state.vertices.get(vertex)
            if record is None or (record.incarnation, record.phase) != (incarnation, VertexPhase.STARTING):
                continue
            process = self._processes.get(vertex)
            if process is not None and process.alive:
                if process.incarnation == incarnation:
                    continue  # an earlier attempt has started it
                raise InvariantBroken(f"one incarnation lives: {incarnation} starts beside {process}")
            if vertex in self._fails_next:
                self._fails_next.discard(vertex)
                self._tell(e.VertexStartFailed(vertex, incarnation, error="setup() raised"))
            elif vertex in self._away:
                waiting.append(vertex)
            else:
                if (vertex, incarnation) in self._waiting:
                    self._tell(e.VertexFoundRoom(vertex, incarnation))
                self._spawn(vertex, incarnation)
        for vertex in waiting:
            if (vertex, command.vertices[vertex]) not in self._waiting:
                self._waiting.add((vertex, command.vertices[vertex]))
                self._tell(e.VertexWaitsForRoom(vertex, command.vertices[vertex], "a machine", "none"))
        if waiting:
            self.after(self._timings.look_for_room_s, self._start_region, number, epoch, command)
            return
        self._outbox.pop(number, None)

    def _spawn(self, vertex: str, incarnation: int) -> None:
        process = self._processes[vertex] = _Process(vertex, incarnation)
        if vertex == TRAINER_0:
            self._fit, self._serial, self._reports, self._acknowledged = None, -1, [], 0
        self.after(self._draw.uniform(*self._timings.start_s), self._come_up, process)
        self.after(self.spec.roles[vertex.rpartition("-")[0]].setup_timeout_s, self._give_up_on, process)

    def _come_up(self, process: _Process) -> None:
        if process.alive and process.trouble is None:
            process.up = True
            self._tell(e.VertexStarted(process.vertex, process.incarnation, pid=1, node="n0"))

    def _give_up_on(self, process: _Process) -> None:
        if process.alive and not process.up:
            self._lose(process, Cause.STALLED)

    def _end_process(self, vertex: str, incarnation: int) -> None:
        """End this incarnation and all before it."""
        process = self._processes.get(vertex)
        if process is not None and process.alive and process.incarnation <= incarnation:
            process.alive = False
            self._work()

    # -- faults -------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        if fault.vertex == MASTER:
            self._kill_master()
            return
        if fault.kind is FaultKind.FAIL_START:
            self._fails_next.add(fault.vertex)
        elif fault.kind is FaultKind.AVAILABLE:
            self._away.discard(fault.vertex)
            return
        elif fault.kind is FaultKind.PREEMPTED:
            self._away.add(fault.vertex)
        elif fault.kind is FaultKind.USER_CODE:
            self._raises[fault.vertex] = self._raises.get(fault.vertex, 0) + 1
        process = self._processes.get(fault.vertex)
        if process is None or not process.alive or process.trouble is not None:
            return
        self.result.faults[fault.kind.value] += 1
        if fault.kind in (FaultKind.KILL, FaultKind.PREEMPTED):
            process.alive = False
            self.after(self._timings.notice_death_s, self._lose, process, Cause.DIED)
        elif fault.kind in (FaultKind.HANG, FaultKind.STALL):
            process.trouble = fault.kind
            if process.up:
                role = self.spec.roles[fault.vertex.rpartition("-")[0]]
                hung = fault.kind is FaultKind.HANG
                limit_s = self.spec.failover.silence_timeout_s if hung else role.stall_timeout_s
                self.after(limit_s, self._notice, process, Cause.SILENT if hung else Cause.STALLED)
        self._work()

    def _notice(self, process: _Process, cause: Cause) -> None:
        if process.alive:
            self._lose(process, cause)

    def _lose(self, process: _Process, cause: Cause) -> None:
        self._tell(e.VertexLost(process.vertex, process.incarnation, cause.value, {"error": cause.value}))

    # -- the trainer --------------------------------------------------------------------------------

    def _can_work(self) -> bool:
        trainer = self._processes.get(TRAINER_0)
        if trainer is None or not trainer.works or trainer.incarnation != self._fit or self._paused:
            return False
        for role, spec in self.spec.roles.items():
            if role == TRAINER:
                continue
            ranks = [vertex for vertex in self._roster if vertex.rpartition("-")[0] == role]
            if len(ranks) < (self._roles.get(role, spec.total) if spec.gang else 1):
                return False
        return all(
            (process := self._processes.get(vertex)) is not None
            and process.works
            and process.incarnation == incarnation
            for vertex, incarnation in self._roster.items()
        )

    def _work(self) -> None:
        """Begin a step if none runs and one can be made; give up a step that can no longer end."""
        if self._can_work():
            if not self._stepping:
                self._idle(False)
                self._stepping = True
                self._attempt += 1
                self.after(self._draw.uniform(*self._timings.step_s), self._end_step, self._attempt)
            return
        self._idle(True)
        if self._stepping:
            self._stepping = False
            self.result.steps_lost += 1

    def _idle(self, idle: bool) -> None:
        if idle and self._idle_since is None and self.state.job.trainer_started and not self._paused:
            self._idle_since = self.now
        elif not idle and self._idle_since is not None:
            self.result.downtime_s += self.now - self._idle_since
            self._idle_since = None

    def _end_step(self, attempt: int) -> None:
        if not self._stepping or attempt != self._attempt:
            return  # the step was given up
        self._stepping = False
        assert self._fit is not None
        failing = next((vertex for vertex in self._roster if self._raises.get(vertex)), None)
        if failing is not None:
            self._raises[failing] -= 1
            self._report(
                e.OperatorFailed,
                vertex=failing,
                vertex_incarnation=self._roster[failing],
                operator="run",
                error="ValueError: by plan",
                traceback="Traceback …",
                user_code=True,
            )
            self._work()
            return
        step = self._steps_done = self._steps_done + 1
        self._report(e.StepCompleted, step=step, version=step)
        self._report(e.WeightsPublished, version=step, step=step, checksum="", size_bytes=0)
        if step % self.spec.run.checkpoint_every == 0:
            self._report(e.CheckpointCommitted, step=step, path=f"step-{step}")
        if step >= self._wanted_steps or self._stopping:
            self._report(e.TrainerFinished, result={"steps": step}, stopped=self._stopping)
            self._fit = None
            return
        self._work()

    def _report(self, kind: type[e.Event], **fields: Any) -> None:
        made: Any = kind
        event = made(incarnation=self._fit, report=len(self._reports) + 1, **fields)
        self._reports.append(event)
        self._arrive_in_order(event)

    def _arrive_in_order(self, event: e.Event) -> None:
        """Deliver a trainer's report in order: reports of one trainer come in one call's answer."""
        if self._epoch >= 0:
            self._decide(event)
            if self._delivery.duplicate and self._draw.random() < self._delivery.duplicate:
                self._decide(event)
