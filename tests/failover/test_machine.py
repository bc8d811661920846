"""The coordinator against a world that does anything it likes, and a master that dies whenever it likes.

The world is processes and news on their way; Hypothesis chooses what happens next. After every step the rules
below hold; and from every state that it reaches, once nothing goes wrong any more, the job ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre.config import Budget
from gyre.failover import JobState, VertexPhase, VertexRecord, differences, fold, rows_of, state_from
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.sim import Witness
from tests.failover.histories import Recorded, coordinator_of, spec_with

SPEC = spec_with(
    vertex=Budget(max=3, window_s=100),
    region=Budget(max=2, window_s=100),
    job=Budget(max=1, window_s=300),
    user_error=Budget(max=1, window_s=100),
    retry=Budget(max=2, window_s=60),
)
COORDINATOR = coordinator_of(SPEC)
ROUNDS_TO_THE_END = 60
TRAINER_0 = "trainer-0"


@dataclass(eq=False)
class Process:
    vertex: str
    incarnation: int
    alive: bool = True
    up: bool = False
    lost: bool = False
    """Its loss has been told: a process that hangs is alive all the same."""

    @property
    def pair(self) -> tuple[str, int]:
        return self.vertex, self.incarnation


@dataclass(eq=False)
class Outstanding:
    command: c.Command
    tried: bool = False


class World(RuleBasedStateMachine):
    @initialize(calm_rounds=st.integers(0, 3))
    def submit(self, calm_rounds: int) -> None:
        self.now = 0.0
        self.state = JobState()
        self.history: list[Recorded] = []
        self.witness = Witness(SPEC)
        self.outbox: list[Outstanding] = []
        self.news: list[e.Event] = []
        self.processes: list[Process] = []
        self.epoch = 1
        self.fit: int | None = None
        self.roster: dict[str, int] = {}
        self.serial = -1
        self.reported: list[e.Event] = []
        self.told = 0
        """How many of the reports have been handed to a master."""
        roles = {name: role.total for name, role in SPEC.roles.items()}
        self.decide(e.JobSubmitted("j1", "small", roles))
        self.decide(e.MasterStarted(1, pid=1, node="n0"))
        for _ in range(calm_rounds):
            self.let_everything_happen(finish=False)

    # -- the master ---------------------------------------------------------------------------------

    def decide(self, event: e.Event) -> None:
        before = self.state
        decision = COORDINATOR.decide(before, event, self.now)
        self.witness.check(before, event, decision, self.now)
        self.state = decision.state
        body = json.loads(json.dumps(e.body_of(event), sort_keys=True))
        self.history.append(Recorded(len(self.history) + 1, e.kind_of(event), self.now, body))
        self.outbox += [Outstanding(command) for command in decision.commands]
        self.outbox = [item for item in self.outbox if not self.is_done(item)]

    def is_done(self, item: Outstanding) -> bool:
        command = item.command
        if isinstance(command, c.StartRegion):
            return not any(self.phase_of(*pair) is VertexPhase.STARTING for pair in command.vertices.items())
        if isinstance(command, c.StopVertex):
            return self.phase_of(command.vertex, command.incarnation) is not VertexPhase.STOPPING
        return item.tried

    def phase_of(self, vertex: str, incarnation: int) -> VertexPhase | None:
        record = self.state.vertices.get(vertex)
        return record.phase if record is not None and record.incarnation == incarnation else None

    @rule()
    def crash(self) -> None:
        """The master dies; its successor has the rows, the outbox, and what still lives."""
        rows = json.loads(json.dumps([[list(key), row] for key, row in sorted(rows_of(self.state).items())]))
        self.state = state_from({tuple(key): row for key, row in rows})
        self.epoch += 1
        self.news = []
        for item in self.outbox:
            item.tried = False
        self.decide(e.MasterStarted(self.epoch, pid=self.epoch, node="n0"))
        for record in self.state.vertices.values():
            process = self.process_of(record.id, record.incarnation)
            if record.phase is VertexPhase.RUNNING and (process is None or not process.alive):
                self.news.append(e.VertexLost(record.id, record.incarnation, "process_died"))
            elif record.phase is VertexPhase.RUNNING and process is not None and process.lost:
                self.news.append(e.VertexLost(record.id, record.incarnation, "silent"))
        reported = self.state.vertices[TRAINER_0].reported
        self.told = min(self.told, reported)

    def process_of(self, vertex: str, incarnation: int) -> Process | None:
        return next((p for p in self.processes if p.pair == (vertex, incarnation)), None)

    # -- commands -----------------------------------------------------------------------------------

    def untried(self) -> list[Outstanding]:
        return [item for item in self.outbox if not item.tried]

    @precondition(lambda self: self.untried())
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        self.run(data.draw(st.sampled_from(self.untried()), label="command"))

    def run(self, item: Outstanding) -> None:
        item.tried = True
        match item.command:
            case c.StartRegion() as command:
                self.now = max(self.now, command.not_before)
                for pair in command.replaces.items():
                    self.kill(*pair)
                for pair in command.vertices.items():
                    if self.phase_of(*pair) is VertexPhase.STARTING:
                        self.spawn(*pair)
            case c.StopVertex() as command:
                self.kill(command.vertex, command.incarnation)
                self.news.append(e.VertexStopped(command.vertex, command.incarnation))
            case c.SetTimer() as command:
                self.now = max(self.now, command.at)
                self.news.append(e.TimerFired(command.timer))
            case c.StartTrainer() as command:
                self.hear(command.incarnation, command.serial, command.running)
                if self.lives(TRAINER_0, command.incarnation):
                    self.fit = command.incarnation
            case c.AnnounceRoster() as command:
                self.hear(command.trainer_incarnation, command.serial, command.running)
            case c.StopTrainer() as command if command.incarnation == self.fit:
                self.finish(stopped=True)
        self.outbox = [item for item in self.outbox if not self.is_done(item)]

    def spawn(self, vertex: str, incarnation: int) -> None:
        process = self.process_of(vertex, incarnation)
        if process is not None and process.alive:
            if process.lost:
                self.news.append(e.VertexLost(vertex, incarnation, "silent"))
            elif process.up:
                self.news.append(e.VertexStarted(vertex, incarnation, pid=1, node="n0"))
            return
        others = [p for p in self.processes if p.vertex == vertex and p.alive]
        assert not others, f"one incarnation lives: {incarnation} of {vertex} starts beside {others}"
        self.processes = [p for p in self.processes if p.pair != (vertex, incarnation)]
        self.processes.append(Process(vertex, incarnation))
        if vertex == TRAINER_0:
            self.fit, self.serial, self.reported, self.told = None, -1, [], 0

    def kill(self, vertex: str, incarnation: int) -> None:
        """This incarnation and those before it, as both commands that end processes promise."""
        for process in self.processes:
            if process.vertex == vertex and process.incarnation <= incarnation:
                process.alive = False

    def hear(self, trainer: int, serial: int, running: dict[str, int]) -> None:
        if self.lives(TRAINER_0, trainer) and serial > self.serial:
            self.serial, self.roster = serial, running

    def lives(self, vertex: str, incarnation: int) -> bool:
        process = self.process_of(vertex, incarnation)
        return process is not None and process.alive

    # -- processes ----------------------------------------------------------------------------------

    def in_state(self, *, up: bool) -> list[Process]:
        return [p for p in self.processes if p.alive and not p.lost and p.up is up]

    @precondition(lambda self: self.in_state(up=False))
    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        self.set_up(data.draw(st.sampled_from(self.in_state(up=False)), label="process"))

    def set_up(self, process: Process) -> None:
        process.up = True
        self.news.append(e.VertexStarted(*process.pair, pid=1, node="n0"))

    @precondition(lambda self: self.in_state(up=False))
    @rule(data=st.data(), user_code=st.booleans())
    def fail_setup(self, data: st.DataObject, user_code: bool) -> None:
        process = data.draw(st.sampled_from(self.in_state(up=False)), label="process")
        process.lost = True
        self.news.append(e.VertexStartFailed(*process.pair, error="no", user_code=user_code))

    @precondition(lambda self: self.in_state(up=True) + self.in_state(up=False))
    @rule(data=st.data(), hangs=st.booleans())
    def die(self, data: st.DataObject, hangs: bool) -> None:
        process = data.draw(
            st.sampled_from(self.in_state(up=True) + self.in_state(up=False)), label="process"
        )
        process.alive = hangs
        process.lost = True
        self.news.append(e.VertexLost(*process.pair, "silent" if hangs else "process_died"))

    # -- the trainer --------------------------------------------------------------------------------

    def fit_runs(self) -> bool:
        process = None if self.fit is None else self.process_of(TRAINER_0, self.fit)
        return process is not None and process.alive and not process.lost

    def report(self, kind: Any, **fields: Any) -> None:
        self.reported.append(kind(incarnation=self.fit, report=len(self.reported) + 1, **fields))

    @precondition(lambda self: self.fit_runs())
    @rule()
    def step(self) -> None:
        step = self.state.job.step + 1
        self.report(e.StepCompleted, step=step, version=step)
        self.report(e.WeightsPublished, version=step, step=step, checksum="x", size_bytes=1)
        self.report(e.CheckpointCommitted, step=step, path="p")

    @precondition(lambda self: self.fit_runs() and self.roster)
    @rule(data=st.data(), user_code=st.booleans())
    def fail_call(self, data: st.DataObject, user_code: bool) -> None:
        vertex = data.draw(st.sampled_from(sorted(self.roster)), label="vertex")
        self.report(
            e.OperatorFailed,
            vertex=vertex,
            vertex_incarnation=self.roster[vertex],
            operator="run",
            error="no",
            traceback="",
            user_code=user_code,
        )

    @precondition(lambda self: self.fit_runs())
    @rule(user_code=st.booleans())
    def fail_fit(self, user_code: bool) -> None:
        self.report(e.TrainerFailed, error="no", traceback="", user_code=user_code)
        self.fit = None

    def finish(self, *, stopped: bool) -> None:
        self.report(e.TrainerFinished, result={}, stopped=stopped)
        self.fit = None

    @precondition(lambda self: self.told < len(self.reported))
    @rule(again=st.booleans())
    def take_report(self, again: bool) -> None:
        """Reports of one trainer come in order, but may come again."""
        self.decide(self.reported[self.told])
        self.told += not again

    # -- news ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.news)
    @rule(data=st.data(), duplicate=st.booleans())
    def deliver(self, data: st.DataObject, duplicate: bool) -> None:
        """In any order; whatever is not chosen is delayed."""
        event = data.draw(st.sampled_from(self.news), label="news")
        if not duplicate:
            self.news.remove(event)
        self.decide(event)

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # -- people -------------------------------------------------------------------------------------

    @rule(count=st.integers(0, 5))
    def scale(self, count: int) -> None:
        self.decide(e.ScaleRequested("rollout", count))

    @rule(count=st.integers(0, 5), seen=st.integers(1, 3), possible=st.none() | st.integers(0, 4))
    def advise(self, count: int, seen: int, possible: int | None) -> None:
        advice = e.ScaleAdvised("rollout_manager-0", 1, "rollout", seen, count, "because", possible=possible)
        self.decide(advice)

    @rule(pause=st.booleans())
    def pause_or_resume(self, pause: bool) -> None:
        self.decide(e.PauseRequested() if pause else e.ResumeRequested())

    @precondition(lambda self: len(self.history) > 25)
    @rule()
    def stop(self) -> None:
        self.decide(e.StopRequested("enough"))

    @rule()
    def calm(self) -> None:
        """A while in which nothing new goes wrong."""
        self.let_everything_happen(finish=False)

    # -- what always holds --------------------------------------------------------------------------

    @invariant()
    def the_rows_are_the_state(self) -> None:
        again = state_from(rows_of(self.state))
        assert again == self.state
        assert rows_of(again) == rows_of(self.state)

    @invariant()
    def every_starting_vertex_has_a_start_command(self) -> None:
        asked = {
            pair
            for item in self.outbox
            if isinstance(item.command, c.StartRegion)
            for pair in item.command.vertices.items()
        }
        for record in self.state.vertices.values():
            if record.phase is VertexPhase.STARTING:
                assert (record.id, record.incarnation) in asked

    @invariant()
    def every_stopping_vertex_has_a_stop_command(self) -> None:
        asked = {
            (item.command.vertex, item.command.incarnation)
            for item in self.outbox
            if isinstance(item.command, c.StopVertex)
        }
        for record in self.state.vertices.values():
            if record.phase is VertexPhase.STOPPING:
                assert (record.id, record.incarnation) in asked

    # -- the end ------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.decide(e.ResumeRequested())
        for _ in range(ROUNDS_TO_THE_END):
            if self.state.job.phase.ended:
                break
            self.let_everything_happen(finish=True)
        job = self.state.job
        assert job.phase.ended, (
            f"{job.phase} at {self.now}: {[vars_of(v) for v in self.state.vertices.values()]}"
        )
        assert [p for p in self.processes if p.alive] == [], "nothing outlives its job"
        assert [i for i in self.state.incidents.values() if i.outcome == "open"] == []
        assert all(v.phase is VertexPhase.STOPPED for v in self.state.vertices.values())
        folded = fold(COORDINATOR, self.history)
        assert differences(folded, rows_of(self.state)) == []
        before = len(self.history)
        self.decide(e.VertexLost("rollout-0", 1, "process_died"))
        assert len(self.history) == before + 1
        assert not self.outbox or not any(isinstance(o.command, c.StartRegion) for o in self.outbox)

    def let_everything_happen(self, *, finish: bool) -> None:
        self.now += 1.0
        for item in self.untried():
            self.run(item)
        for process in self.in_state(up=False):
            self.set_up(process)
        news, self.news = self.news, []
        for event in news:
            self.decide(event)
        while self.told < len(self.reported):
            self.decide(self.reported[self.told])
            self.told += 1
        running = {
            v.id: v.incarnation
            for v in self.state.vertices.values()
            if v.phase is VertexPhase.RUNNING and v.role != "trainer"
        }
        wanted = {f"{role}-{n}" for role, count in self.state.job.roles.items() for n in range(count)}
        if finish and self.fit_runs() and self.roster == running and running.keys() | {TRAINER_0} == wanted:
            self.no_incident_is_open_when_all_runs()
            self.finish(stopped=False)

    def no_incident_is_open_when_all_runs(self) -> None:
        unsettled = [i for i in self.state.incidents.values() if i.outcome == "open"]
        assert unsettled == [] or self.state.job.outcome is not None


def vars_of(record: VertexRecord) -> tuple[str, int, str]:
    return record.id, record.incarnation, record.phase.value


TestMachine = World.TestCase
TestMachine.settings = settings(
    max_examples=110,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
