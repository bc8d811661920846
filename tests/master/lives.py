"""A job that a test runs: its store, its world, and one master after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.api.job_replay import coordinator_of, replay_job
from gyre.config import JobSpec, parse_job
from gyre.errors import StoreFull
from gyre.failover import Incident, JobPhase, JobState, VertexPhase, state_from
from gyre.failover.events import event_from
from gyre.store import EventRow, Store, open_store
from gyre.testing.clock import VirtualClock
from tests.doubles.fake_cluster import FakeCluster, FakeTrainer
from tests.doubles.standing_job import MasterDied, MasterLife, small_spec, store_with_job
from tests.failover.witness import Witness
from tests.store.fault_points import BEGUN, at_points

JOB_ID = "j1"


class Job:
    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 6,
        change: Callable[[JobSpec], None] | None = None,
        **knobs: Any,
    ) -> None:
        self.spec = small_spec()
        self.spec.failover.backoff_s = 0.5
        for role in self.spec.roles.values():
            role.stall_timeout_s = 20.0
        if change is not None:
            change(self.spec)
        folder.mkdir()
        self.folder = folder
        self.url = store_with_job(folder, JOB_ID, self.spec)
        self.clock = VirtualClock()
        self.world = FakeCluster(self.clock, trainer=FakeTrainer(steps=steps), **knobs)
        self.store: Store = open_store(self.url)
        """The test's own view of the store; masters open theirs."""
        self.journal = self.store.journal(JOB_ID)

    def life(self, *, on_point: Callable[[str], bool] | None = None) -> Life:
        """A master that does not run yet. It dies at the first fault point for which `on_point` is true."""
        return Life(self, on_point=on_point)

    def run(self, *, limit_s: float = 3000.0) -> Life:
        """One master, from its start to the job's end or its own."""
        return self.life().run(limit_s)

    # -- what came of it ----------------------------------------------------------------------------

    @property
    def events(self) -> list[EventRow]:
        return self.journal.events()

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def state(self) -> JobState:
        return state_from(self.journal.snapshot())

    @property
    def phase(self) -> JobPhase:
        return self.state.job.phase

    @property
    def incidents(self) -> list[Incident]:
        return sorted(self.state.incidents.values(), key=lambda incident: incident.at)

    def check(self) -> None:
        """What must be so after every test."""
        replay = replay_job(self.store, JOB_ID)
        assert replay.differences == []
        self._check_decisions()
        assert len({event.event_id for event in self.events}) == replay.events
        steps = [step for step, _ in self.world.steps]
        assert steps == list(range(1, len(steps) + 1))
        if self.phase.ended:
            assert [process.address for process in self.world.alive] == []
            assert all(v.phase is VertexPhase.STOPPED for v in self.state.vertices.values())
            assert [i for i in self.state.incidents.values() if i.outcome == "open"] == []

    def _check_decisions(self) -> None:
        """Decide the journal again, with a witness at each decision."""
        coordinator = coordinator_of(parse_job(self.store.job(JOB_ID).spec))
        witness, state = Witness(coordinator.spec), JobState()
        for record in self.events:
            event = event_from(record.kind, record.body)
            decision = coordinator.decide(state, event, record.at)
            witness.check(state, event, decision, record.at)
            state = decision.state


class Life(MasterLife):
    """One master process with a script, which a test can have die at any of the store's fault points."""

    def __init__(self, job: Job, *, on_point: Callable[[str], bool] | None = None) -> None:
        super().__init__(job.world, job_id=JOB_ID, store_url=job.url, directory=job.folder)
        self.job = job
        self.points: list[str] = []
        self.full = False
        """While set, no event can be written."""
        self._on_point = on_point
        self.script: list[tuple[float, Callable[[Life], Any]]] = []

    def at(self, at_s: float, action: Callable[[Life], Any]) -> Life:
        """Do something at a moment, in the loop; a coroutine that is returned is run."""
        self.script.append((at_s, action))
        return self

    async def command(self, verb: str, **body: Any) -> int:
        return await self.master._command(verb, body, "tester")

    def run(self, limit_s: float = 3000.0) -> Life:
        asyncio.set_event_loop(None)
        try:
            main = self.start()
            self._hook()
            for at_s, action in self.script:
                self.loop.call_at(max(at_s, self.loop.time()), self._act, action)
            self.loop.call_later(limit_s, self.die)
            main.add_done_callback(self.stop_loop)
            self.loop.run_forever()
            error = None
            if main.done() and not main.cancelled():
                error = main.exception()
        finally:
            self.bury()
        if error is not None and not isinstance(error, MasterDied):
            raise error
        return self

    # -- inside -------------------------------------------------------------------------------------

    def _act(self, action: Callable[[Life], Any]) -> None:
        outcome = action(self)
        if asyncio.iscoroutine(outcome):
            self.loop.create_task(outcome)

    def _hook(self) -> None:
        """Watch the points of the store's writes as soon as the master has opened it."""
        opened = getattr(self.master, "_store", None)
        if opened is None:
            self.loop.call_soon(self._hook)
        else:
            at_points(opened, self._point)

    def _point(self, point: str) -> None:
        """Called in the thread that commits."""
        self.points.append(point)
        if self.full and point == BEGUN:
            raise StoreFull("No space left for the journal.")
        if self.died:
            raise MasterDied(point)
        if self._on_point is not None and self._on_point(point):
            self.died = True
            self.loop.call_soon_threadsafe(self.die)
            raise MasterDied(point)
