"""The coordinator against a world that does anything it likes, and a master that dies whenever it likes.

The processes and the trainer are `FakeCluster`'s. Hypothesis chooses when each command, process and report has its
turn, and in which order news arrive. After every step the rules below hold; and from every state that it reaches, once
nothing goes wrong any more, the job ends.

The coordinator stands here without its master: under the whole `JobMaster` and its journal the same rules made 2
examples in a second of CPU time, here they make 30. `tests/master` has the whole master under random faults.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre.config import Budget
from gyre.failover import JobState, VertexPhase, differences, fold, rows_of, state_from
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.master.cluster import Address
from gyre.master.vertex_reports import event_of
from gyre.testing.clock import VirtualClock
from tests.doubles.fake_cluster import FakeCluster, FakeProcess, FakeTrainer, Fit
from tests.examples import examples
from tests.failover.histories import Recorded, coordinator_of, spec_with
from tests.failover.witness import Witness

SPEC = spec_with(
    vertex=Budget(max=3, window_s=100),
    region=Budget(max=2, window_s=100),
    job=Budget(max=1, window_s=300),
    user_code=Budget(max=1, window_s=100),
    retry=Budget(max=2, window_s=60),
)
COORDINATOR = coordinator_of(SPEC)
ROUNDS_TO_THE_END = 60
TRAINER_0 = "trainer-0"
FOREVER = 10**9


@dataclass(eq=False)
class Outstanding:
    command: c.Command
    tried: bool = False


class World(RuleBasedStateMachine):
    @initialize(calm_rounds=st.integers(0, 3))
    def submit(self, calm_rounds: int) -> None:
        self.clock = VirtualClock()
        self.world = FakeCluster(self.clock, trainer=FakeTrainer(FOREVER, checkpoint_every=1), step_s=FOREVER)
        self.state = self.checked = JobState()
        self.history: list[Recorded] = []
        self.witness = Witness(SPEC)
        self.outbox: list[Outstanding] = []
        self.news: list[e.Event] = []
        self.lost: set[FakeProcess] = set()
        """Processes whose loss has been told: one that hangs is alive all the same."""
        self.epoch = 1
        roles = {name: role.total for name, role in SPEC.roles.items()}
        self.decide(e.JobSubmitted("j1", "small", roles))
        self.decide(e.MasterStarted(1, pid=1, node="n0"))
        for _ in range(calm_rounds):
            self.let_everything_happen(finish=False)

    # -- the master ---------------------------------------------------------------------------------

    def decide(self, event: e.Event) -> None:
        before = self.state
        decision = COORDINATOR.decide(before, event, self.clock.time())
        self.witness.check(before, event, decision, self.clock.time())
        self.state = decision.state
        body = json.loads(json.dumps(e.body_of(event), sort_keys=True))
        self.history.append(Recorded(len(self.history) + 1, e.kind_of(event), self.clock.time(), body))
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
            if record.phase is not VertexPhase.RUNNING:
                continue
            process = self.world.process(record.id, record.incarnation)
            if not process.alive:
                self.news.append(e.VertexLost(record.id, record.incarnation, "process_died"))
            elif process in self.lost:
                self.news.append(e.VertexLost(record.id, record.incarnation, "silent"))

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
                self.pass_until(command.not_before)
                for pair in command.replaces.items():
                    self.kill(*pair)
                for pair in command.vertices.items():
                    if self.phase_of(*pair) is VertexPhase.STARTING:
                        self.spawn(Address(*pair))
            case c.StopVertex() as command:
                self.kill(command.vertex, command.incarnation)
                self.news.append(e.VertexStopped(command.vertex, command.incarnation))
            case c.SetTimer() as command:
                self.pass_until(command.at)
                self.news.append(e.TimerFired(command.timer))
            case c.StartTrainer() as command:
                told = (command.serial, command.running, command.roles, command.paused)
                self.tell_trainer(command.incarnation, "start_fit", *told)
            case c.UpdateMembership() as command:
                told = (command.serial, command.running, command.roles)
                self.tell_trainer(command.trainer_incarnation, "announce", *told)
            case c.StopTrainer() as command:
                self.tell_trainer(command.incarnation, "stop_fit")
        self.outbox = [item for item in self.outbox if not self.is_done(item)]

    def pass_until(self, at: float) -> None:
        self.clock.advance(max(0.0, at - self.clock.time()))

    def spawn(self, address: Address) -> None:
        process = self.world.processes.get(address)
        if process is None or not process.alive:
            self.world.begin(address, self.epoch)  # raises where another incarnation lives
        elif process in self.lost:
            self.news.append(e.VertexLost(address.vertex, address.incarnation, "silent"))
        elif process.bound:
            self.news.append(started(process))

    def kill(self, vertex: str, incarnation: int) -> None:
        """This incarnation and those before it, as both commands that end processes promise."""
        process = self.world.living(vertex)
        if process is not None and process.address.incarnation <= incarnation:
            self.world.end(process, "the master ended it")

    def tell_trainer(self, incarnation: int, method: str, *args: Any) -> None:
        trainer = self.world.processes.get(Address(TRAINER_0, incarnation))
        if trainer is not None and trainer.alive:
            self.world.obey(trainer, method, args)

    # -- processes ----------------------------------------------------------------------------------

    def well(self, *, bound: bool | None = None) -> list[FakeProcess]:
        """The living whose loss has not been told."""
        return [p for p in self.world.alive if p not in self.lost and bound in (None, p.bound)]

    @precondition(lambda self: self.well(bound=False))
    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        self.set_up(data.draw(st.sampled_from(self.well(bound=False)), label="process"))

    def set_up(self, process: FakeProcess) -> None:
        process.bound = True
        self.news.append(started(process))

    @precondition(lambda self: self.well(bound=False))
    @rule(data=st.data(), user_code=st.booleans())
    def fail_setup(self, data: st.DataObject, user_code: bool) -> None:
        process = data.draw(st.sampled_from(self.well(bound=False)), label="process")
        self.lost.add(process)
        self.news.append(e.VertexStartFailed(*astuple(process.address), error="no", user_code=user_code))

    @precondition(lambda self: self.well())
    @rule(data=st.data(), hangs=st.booleans())
    def die(self, data: st.DataObject, hangs: bool) -> None:
        process = data.draw(st.sampled_from(self.well()), label="process")
        self.lost.add(process)
        if not hangs:
            self.world.end(process, "by chance")
        self.news.append(e.VertexLost(*astuple(process.address), "silent" if hangs else "process_died"))

    # -- the trainer --------------------------------------------------------------------------------

    @property
    def fit(self) -> Fit | None:
        """The newest trainer's."""
        return max(self.world.fits.values(), key=lambda fit: fit.process.address.incarnation, default=None)

    @property
    def running_fit(self) -> Fit | None:
        fit = self.fit
        return fit if fit and fit.process in self.well() and fit.started and not fit.ended else None

    @precondition(lambda self: self.running_fit)
    @rule()
    def step(self) -> None:
        assert self.running_fit is not None
        self.world.end_step(self.running_fit)

    @precondition(lambda self: self.running_fit and self.running_fit.running)
    @rule(data=st.data(), user_code=st.booleans())
    def fail_call(self, data: st.DataObject, user_code: bool) -> None:
        assert self.running_fit is not None
        vertex = data.draw(st.sampled_from(sorted(self.running_fit.running)), label="vertex")
        self.world.fail_operator(vertex, user_code=user_code)
        self.world.end_step(self.running_fit)

    @precondition(lambda self: self.running_fit)
    @rule(user_code=st.booleans())
    def fail_fit(self, user_code: bool) -> None:
        fit = self.running_fit
        assert fit is not None
        fit.ended = True
        fit.process.report("TrainerFailed", error="no", traceback="", user_code=user_code)

    @precondition(lambda self: self.fit and self.fit.process.outbox)
    @rule(again=st.booleans())
    def take_report(self, again: bool) -> None:
        """Reports of one trainer come in order, but may come again."""
        assert self.fit is not None
        process = self.fit.process
        report = event_of(process.address, *process.outbox[0])
        self.decide(report)
        if not again:
            del process.outbox[0]
            return
        before = self.state
        self.decide(report)
        assert self.state == before

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
        self.clock.advance(seconds)

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

    @rule(what=st.sampled_from(["rollout-0", "actor-1", "reward-0", "node-0"]))
    def drain(self, what: str) -> None:
        node, vertex = (what, "") if what.startswith("node") else ("", what)
        self.decide(e.DrainRequested(node=node, vertex=vertex))

    @rule()
    def undrain(self) -> None:
        self.decide(e.UndrainRequested(node="node-0"))

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
        if self.state is self.checked:
            return
        rows = rows_of(self.state)
        again = state_from(rows)
        assert again == self.state
        assert rows_of(again) == rows
        self.checked = self.state

    @invariant()
    def every_start_and_every_stop_has_its_command(self) -> None:
        asked: set[tuple[VertexPhase, str, int]] = set()
        for item in self.outbox:
            if isinstance(item.command, c.StartRegion):
                asked |= {(VertexPhase.STARTING, *pair) for pair in item.command.vertices.items()}
            elif isinstance(item.command, c.StopVertex):
                asked.add((VertexPhase.STOPPING, item.command.vertex, item.command.incarnation))
        for record in self.state.vertices.values():
            if record.phase in (VertexPhase.STARTING, VertexPhase.STOPPING):
                assert (record.phase, record.id, record.incarnation) in asked

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
        assert job.phase.ended, f"{job.phase} at {self.clock.time()}: {self.state.vertices}"
        assert self.world.alive == [], "nothing outlives its job"
        assert [i for i in self.state.incidents.values() if i.outcome == "open"] == []
        assert all(v.phase is VertexPhase.STOPPED for v in self.state.vertices.values())
        folded = fold(COORDINATOR, self.history)
        assert differences(folded, rows_of(self.state)) == []
        before = len(self.history)
        self.decide(e.VertexLost("rollout-0", 1, "process_died"))
        assert len(self.history) == before + 1
        assert not self.outbox or not any(isinstance(o.command, c.StartRegion) for o in self.outbox)

    def let_everything_happen(self, *, finish: bool) -> None:
        self.clock.advance(1.0)
        for item in self.untried():
            self.run(item)
        for process in self.well(bound=False):
            self.set_up(process)
        news, self.news = self.news, []
        for event in news:
            self.decide(event)
        while self.fit and self.fit.process.outbox:
            self.take_report(again=False)
        running = {
            v.id: v.incarnation
            for v in self.state.vertices.values()
            if v.phase is VertexPhase.RUNNING and v.role != "trainer"
        }
        wanted = {f"{role}-{n}" for role, count in self.state.job.roles.items() for n in range(count)}
        fit = self.running_fit
        if fit and finish and fit.running == running and running.keys() | {TRAINER_0} == wanted:
            unsettled = [i for i in self.state.incidents.values() if i.outcome == "open"]
            assert unsettled == [] or self.state.job.outcome is not None, "all runs"
            self.world.trainer.steps = 0
        if fit and (fit.stopping or self.world.trainer.steps == 0):
            self.world.end_step(fit)


def started(process: FakeProcess) -> e.VertexStarted:
    return e.VertexStarted(*astuple(process.address), pid=process.pid, node=process.node)


TestMachine = World.TestCase
TestMachine.settings = settings(
    max_examples=examples(150),
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
