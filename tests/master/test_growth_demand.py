"""Growth beyond the present machines, in virtual time: it is shown, comes true, or is withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.config import JobSpec
from gyre.failover import FailoverCoordinator, JobPhase, JobState
from gyre.failover import events as e
from gyre.graph import compile_job
from gyre.master.growth_demand import GrowthDemand
from gyre.master.room import RoomQueue
from gyre.master.vertex_scheduler import Scheduler
from gyre.store import QueuedJob
from gyre.testing.clock import VirtualClock, run_virtual
from tests.doubles.fake_cluster import FakeCluster
from tests.doubles.standing_job import small_spec

TIMEOUT_S = 100.0


def spec() -> JobSpec:
    """The small job, each of whose rollouts takes 4 CPUs of a machine with 4."""
    made = small_spec()
    made.roles["rollout"].resources.cpu = 4.0
    made.roles["rollout"].total = 1
    elastic = made.roles["rollout"].elastic
    assert elastic is not None
    elastic.max, elastic.machines_timeout_s = 4, TIMEOUT_S
    return made


class Bench:
    epoch = 1

    def __init__(self, folder: Path) -> None:
        compiled = compile_job(spec())
        self.coordinator = FailoverCoordinator(compiled.spec, compiled.graph.region_or_alone)
        roles = {name: role.total for name, role in compiled.spec.roles.items()}
        self.state = self.coordinator.decide(JobState(), e.JobSubmitted("j1", "small", roles), 0.0).state
        self.clock = VirtualClock()
        self.world = FakeCluster(self.clock, nodes=0)
        self.world.add_machine("first", cpu=16.0)
        self.queued: list[QueuedJob] = []
        cluster = self.world.connect()
        scheduler = Scheduler(
            compiled.spec,
            cluster,
            job_id="j1",
            directory=folder,
            store_url="",
            job=self,
            clock=self.clock,
            queue=RoomQueue("j1", self, None, self.clock),
        )
        self.places = scheduler.places
        context: Any = self
        self.growth = GrowthDemand(
            compiled.spec,
            cluster,
            scheduler.plans,
            scheduler.places,
            context,
            clock=self.clock,
        )

    def queue(self, ray_address: str | None, now: float) -> list[QueuedJob]:
        return self.queued

    def submit(self, event: e.Event, *, actor: str) -> None:
        self.decide(event)

    def decide(self, event: e.Event) -> None:
        self.state = self.coordinator.decide(self.state, event, self.clock.time()).state

    async def advise(self, count: int) -> None:
        """The policy's advice, as the master completes and follows it."""
        seen = self.state.job.roles["rollout"]
        possible = await self.places.room("rollout", min(count, 4))
        advice = e.ScaleAdvised("rollout_manager-0", 1, "rollout", seen, count, "wait", possible=possible)
        await self.growth.advised(advice)
        self.decide(advice)

    async def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            await self.growth.look()

    @property
    def count(self) -> int:
        return self.state.job.roles["rollout"]

    @property
    def shown(self) -> set[str]:
        return set(self.world.room.demands)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        run_virtual(scenario(), self.clock)  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.world.occupy("first", cpu=8.0)  # of 16: the job's rollout, and little else
    return made


def test_what_has_no_room_is_shown_and_comes_true_within_seconds(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.advise(3)
        have = bench.count
        assert bench.shown == {f"rollout-{rank}" for rank in range(have, 3)} != set()
        bench.world.add_machine("second", cpu=16.0)
        await bench.pass_s(2)
        assert bench.count == 3
        assert bench.growth.shown == {}

    bench.run(scenario)


def test_one_machine_that_comes_is_used_while_another_is_waited_for(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.advise(4)
        have = bench.count
        bench.world.add_machine("second", cpu=4.0)
        await bench.pass_s(2)
        assert bench.count == have + 1
        assert bench.growth.shown == {"rollout": 4 - have - 1}
        bench.world.add_machine("third", cpu=16.0)
        await bench.pass_s(2)
        assert bench.count == 4

    bench.run(scenario)


def test_what_never_comes_is_withdrawn_and_not_asked_for_again_at_once(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.advise(4)
        await bench.pass_s(int(TIMEOUT_S / 2))
        await bench.advise(4)  # the policy repeats itself, and that is no new wish
        assert bench.shown
        await bench.pass_s(int(TIMEOUT_S / 2) + 1)
        assert bench.shown == set()
        await bench.advise(4)
        assert bench.shown == set()
        await bench.pass_s(int(TIMEOUT_S))
        await bench.advise(4)
        assert bench.shown

    bench.run(scenario)


@pytest.mark.parametrize("why", ["fewer", "by hand", "paused", "stopping", "another job is first"])
def test_what_is_no_longer_wanted_is_withdrawn(bench: Bench, why: str) -> None:
    async def scenario() -> None:
        await bench.advise(4)
        await bench.pass_s(1)
        assert bench.shown
        if why == "fewer":
            await bench.advise(bench.count)
        elif why == "by hand":
            bench.decide(e.ScaleRequested("rollout", 1 if bench.count > 1 else 2))
        elif why == "paused":
            bench.decide(e.PauseRequested())
        elif why == "stopping":
            bench.state = replace(bench.state, job=replace(bench.state.job, phase=JobPhase.STOPPING))
        else:
            bench.queued = [QueuedJob("j0", "earlier", 0.0)]
        await bench.pass_s(3)
        assert bench.shown == set()
        assert bench.growth.shown == {}

    bench.run(scenario)


def test_a_next_master_takes_back_what_nobody_wants(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        await bench.advise(4)
        assert bench.shown
        await bench.places.release_unwanted()
        assert bench.shown == set()

    bench.run(scenario)
