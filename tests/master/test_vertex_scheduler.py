"""Starts that are overtaken while they wait, and processes that nobody else would end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.config import JobSpec
from gyre.failover import FailoverCoordinator, JobPhase, JobState, VertexPhase
from gyre.failover import events as e
from gyre.failover.commands import StartRegion, StopVertex
from gyre.failover.state import VertexRecord
from gyre.graph import compile_job
from gyre.master.cluster import Address
from gyre.master.room import RoomQueue
from gyre.master.vertex_scheduler import Scheduler
from gyre.rollouts.weight_dirs import of_publisher
from gyre.store import QueuedJob
from gyre.testing.clock import VirtualClock, run_virtual
from gyre.weights.owned_dirs import OwnedDir
from tests.doubles.fake_cluster import FakeCluster
from tests.doubles.standing_job import small_spec

VERTEX = "rollout-0"


class Queue:
    """A store whose queue is what the test says."""

    def __init__(self, jobs: Callable[[], Sequence[QueuedJob]] = tuple) -> None:
        self.jobs = jobs

    def queue(self, ray_address: str | None, now: float) -> Sequence[QueuedJob]:
        return self.jobs()


class Bench:
    """A scheduler with a state that the test sets."""

    epoch = 1

    def __init__(
        self,
        folder: Path,
        spec: JobSpec | None = None,
        *,
        machines: int = 1,
        queued: Callable[[], Sequence[QueuedJob]] = tuple,
    ) -> None:
        compiled = compile_job(spec or small_spec())
        spec = compiled.spec
        coordinator = FailoverCoordinator(spec, compiled.graph.region_or_alone)
        roles = {name: role.total for name, role in spec.roles.items()}
        self.state = coordinator.decide(JobState(), e.JobSubmitted("j1", "small", roles), 0.0).state
        self.clock = VirtualClock()
        self.world = FakeCluster(self.clock, nodes=machines)
        self.scheduler = Scheduler(
            spec,
            self.world.connect(),
            job_id="j1",
            directory=folder,
            store_url="",
            job=self,
            clock=self.clock,
            queue=RoomQueue("j1", Queue(queued), None, self.clock),
        )

    def say(self, incarnation: int, phase: VertexPhase = VertexPhase.STARTING) -> None:
        """The state's word on the vertex from now on."""
        record = replace(self.state.vertices[VERTEX], incarnation=incarnation, phase=phase)
        self.state = replace(self.state, vertices={**self.state.vertices, VERTEX: record})

    def later(self, after_s: float, incarnation: int, phase: VertexPhase = VertexPhase.STARTING) -> None:
        asyncio.get_running_loop().call_later(after_s, self.say, incarnation, phase)

    async def start(
        self, incarnation: int, *, replaces: int = 0, wait_s: float = 0.0, vertex: str = VERTEX
    ) -> list[e.Event]:
        command = StartRegion(
            vertex,
            {vertex: incarnation},
            {vertex: replaces} if replaces else {},
            self.clock.time() + wait_s if wait_s else 0.0,
        )
        return [event async for event in self.scheduler.start_region(command)]

    @property
    def alive(self) -> list[Address]:
        return [process.address for process in self.world.alive]

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        run_virtual(scenario(), self.clock)  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_vertex_comes_up(bench: Bench) -> None:
    async def scenario() -> None:
        [event] = await bench.start(1)
        assert isinstance(event, e.VertexStarted)
        assert (event.vertex, event.incarnation, event.node) == (VERTEX, 1, "node-0")

    bench.run(scenario)


def test_every_earlier_incarnation_is_ended_before_the_next_starts(bench: Bench) -> None:
    """The start of incarnation 2 was given up before it ended incarnation 1, which hangs."""

    async def scenario() -> None:
        await bench.start(1)
        bench.world.hang(VERTEX)
        bench.say(3)
        [event] = await bench.start(3, replaces=2)
        assert isinstance(event, e.VertexStarted)
        assert bench.alive == [Address(VERTEX, 3)]

    bench.run(scenario)


def test_stopping_a_vertex_ends_its_earlier_incarnations_too(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.start(1)
        bench.say(2, VertexPhase.STOPPING)
        assert await bench.scheduler.stop_vertex(StopVertex(VERTEX, 2)) == e.VertexStopped(VERTEX, 2)
        assert bench.alive == []

    bench.run(scenario)


def test_who_is_scaled_away_gives_its_place_back(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.start(1, vertex="rollout-1")
        [place] = bench.world.room.places
        records = {**bench.state.vertices}
        records["rollout-1"] = replace(records["rollout-1"], phase=VertexPhase.STOPPING)
        job = replace(bench.state.job, roles={**bench.state.job.roles, "rollout": 1})
        bench.state = replace(bench.state, job=job, vertices=records)
        await bench.scheduler.stop_vertex(StopVertex("rollout-1", 1))
        assert bench.world.room.places == {}, f"{place} is held"

    bench.run(scenario)


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STOPPING])
def test_who_is_stopped_is_told_whether_the_job_ends(bench: Bench, phase: JobPhase) -> None:
    async def scenario() -> None:
        await bench.start(1)
        bench.say(1, VertexPhase.STOPPING)
        bench.state = replace(bench.state, job=replace(bench.state.job, phase=phase))
        await bench.scheduler.stop_vertex(StopVertex(VERTEX, 1))
        assert bench.world.process(VERTEX, 1).job_ends is (phase is JobPhase.STOPPING)

    bench.run(scenario)


def test_the_old_one_is_ended_before_the_back_off_not_after(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.start(1)
        bench.say(2)
        seen: list[list[Address]] = []
        asyncio.get_running_loop().call_later(5.0, lambda: seen.append(bench.alive))
        await bench.start(2, replaces=1, wait_s=30.0)
        assert bench.clock.monotonic() > 30.0
        assert seen == [[]], "it held its device while nobody used it"

    bench.run(scenario)


@pytest.mark.parametrize("phase", [VertexPhase.STARTING, VertexPhase.STOPPING])
def test_a_start_that_is_overtaken_while_it_waits_starts_nothing(bench: Bench, phase: VertexPhase) -> None:
    async def scenario() -> None:
        bench.later(10.0, 2, phase)
        assert await bench.start(1, wait_s=30.0) == []
        assert bench.world.spawned == []

    bench.run(scenario)


def test_a_start_whose_vertex_is_scaled_away_while_it_waits_starts_nothing(bench: Bench) -> None:
    """The plan of the vertices that are wanted then does not know it."""

    def scale_down() -> None:
        records = {**bench.state.vertices}
        records["rollout-1"] = replace(records["rollout-1"], phase=VertexPhase.STOPPING)
        job = replace(bench.state.job, roles={**bench.state.job.roles, "rollout": 1})
        bench.state = replace(bench.state, job=job, vertices=records)

    async def scenario() -> None:
        asyncio.get_running_loop().call_later(10.0, scale_down)
        assert await bench.start(1, vertex="rollout-1", wait_s=30.0) == []
        assert bench.world.spawned == []

    bench.run(scenario)


def test_a_start_that_is_overtaken_while_it_waits_for_room_starts_nothing(bench: Bench) -> None:
    async def scenario() -> None:
        bench.world.no_room = {VERTEX}
        bench.later(10.0, 2)
        bench.world.at(20.0, bench.world.no_room.clear)
        [told] = await bench.start(1)
        assert isinstance(told, e.VertexWaitsForRoom)
        assert bench.world.spawned == []

    bench.run(scenario)


def test_a_start_that_is_overtaken_while_its_process_comes_up_leaves_nothing(bench: Bench) -> None:
    async def scenario() -> None:
        bench.world.start_delay_s = 5.0
        bench.later(2.0, 2)
        assert await bench.start(1) == []
        assert bench.world.spawned == [Address(VERTEX, 1)]
        assert bench.alive == []

    bench.run(scenario)


def test_where_there_is_no_room_it_says_so_and_goes_on_trying(bench: Bench) -> None:
    async def scenario() -> None:
        bench.world.no_room = {VERTEX}
        bench.world.at(600.0, bench.world.no_room.clear)
        waits, found, started = await bench.start(1)
        assert isinstance(waits, e.VertexWaitsForRoom)
        assert (waits.required, waits.available) == ("1", "0")
        assert found == e.VertexFoundRoom(VERTEX, 1)
        assert isinstance(started, e.VertexStarted)
        assert 600.0 <= bench.clock.monotonic() < 610.0

    bench.run(scenario)


def test_who_restarts_stays_where_its_place_is_when_machines_come(bench: Bench) -> None:
    """Else another's place would be sought on its machine, and would wait there for ever."""

    async def scenario() -> None:
        bench.world.add_machine("node-1")
        bench.world.add_machine("node-2")
        records = {**bench.state.vertices}
        records[VERTEX] = replace(records[VERTEX], phase=VertexPhase.STARTING, node="node-2")
        bench.state = replace(bench.state, vertices=records)
        fitted = await bench.scheduler.plans.fitted()
        assert fitted.plan.machines()[VERTEX] == "node-2"
        assert not fitted.lacking

    bench.run(scenario)


def test_without_any_machine_it_waits_for_one(bench: Bench) -> None:
    async def scenario() -> None:
        bench.world.lose_machine("node-0")
        bench.world.at(100.0, bench.world.add_machine, "node-1")
        waits, found, started = await bench.start(1)
        assert isinstance(waits, e.VertexWaitsForRoom)
        assert waits.available == "no machine"
        assert found == e.VertexFoundRoom(VERTEX, 1)
        assert isinstance(started, e.VertexStarted)
        assert 100.0 <= bench.clock.monotonic() < 105.0

    bench.run(scenario)


def test_a_setup_that_does_not_return_is_a_stall_with_its_stack(bench: Bench) -> None:
    async def scenario() -> None:
        bench.world.at(0.3, bench.world.stall, VERTEX)
        [event] = await bench.start(1)
        assert isinstance(event, e.VertexLost)
        assert event.cause == "stalled"
        assert "setup() did not return within 600 s" in event.evidence["error"]
        assert "generate" in event.evidence["stack"]

    bench.run(scenario)


def test_a_process_that_dies_in_its_setup_is_lost(bench: Bench) -> None:
    async def scenario() -> None:
        bench.world.at(0.4, bench.world.kill, VERTEX)
        [event] = await bench.start(1)
        assert isinstance(event, e.VertexLost)
        assert event.cause == "process_died"

    bench.run(scenario)


def test_everything_is_given_back_also_what_an_earlier_master_took(bench: Bench) -> None:
    async def scenario() -> None:
        names = {
            sub_graph.id
            for sub_graph in bench.scheduler.plans.compiled(bench.state.job.roles).plan.sub_graphs
        }
        bench.world.room.places = {name: [] for name in names}
        job = replace(bench.state.job, roles={**bench.state.job.roles, "rollout": 1})
        bench.state = replace(bench.state, job=job)
        await bench.scheduler.places.release_all()
        assert bench.world.room.places == {}

    bench.run(scenario)


def test_weights_of_an_actor_that_was_killed_and_never_came_back_go_with_the_job(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.rollouts.weight_dirs.default_root", lambda: tmp_path / "shm")
    killed, other = (
        OwnedDir(tmp_path / "shm", of_publisher(job)) for job in (tmp_path, tmp_path / "another")
    )
    killed.close(keep=True)  # as its death would

    async def scenario() -> None:
        await bench.scheduler.places.release_all()
        assert list((tmp_path / "shm").iterdir()) == [other.path]

    bench.run(scenario)
    other.close()


# -- where ------------------------------------------------------------------------------------------


def needing(**cpus: float) -> JobSpec:
    """The small job, with so many CPUs for a vertex of each role that is named."""
    spec = small_spec()
    for role, cpu in cpus.items():
        spec.roles[role].resources.cpu = cpu
    return spec


def runs(bench: Bench, **nodes: str) -> None:
    """Vertices run on these machines; an underscore stands for the hyphen of their names."""
    records = {**bench.state.vertices}
    for name, node in nodes.items():
        vertex = name.replace("_", "-")
        records[vertex] = replace(records[vertex], phase=VertexPhase.RUNNING, node=node)
    bench.state = replace(bench.state, vertices=records)


def wants(bench: Bench, rollouts: int) -> None:
    """The role of rollouts is scaled."""
    records = {**bench.state.vertices}
    for rank in range(rollouts):
        records.setdefault(f"rollout-{rank}", VertexRecord(f"rollout-{rank}", "rollout", rank))
    job = replace(bench.state.job, roles={**bench.state.job.roles, "rollout": rollouts})
    bench.state = replace(bench.state, job=job, vertices=records)


def test_who_is_new_goes_where_room_is_and_the_others_stay(tmp_path: Path) -> None:
    """A plan made anew would put them elsewhere, and the new one on a machine that is full."""
    bench = Bench(tmp_path, needing(rollout=1), machines=0)

    async def scenario() -> None:
        for name in ("a", "b", "c"):
            bench.world.add_machine(name, cpu=1.0)
        runs(bench, rollout_0="c", rollout_1="a")
        wants(bench, 3)
        where = (await bench.scheduler.plans.fitted()).plan.machines()
        assert [where[f"rollout-{rank}"] for rank in range(3)] == ["c", "a", "b"]
        wants(bench, 4)
        fitted = await bench.scheduler.plans.fitted()
        assert list(fitted.lacking) == ["rollout-3"]
        assert await bench.scheduler.places.room("rollout", 4) == 4, "they are wanted already"
        bench.world.add_machine("d", cpu=1.0)
        assert (await bench.scheduler.plans.fitted()).plan.machines()["rollout-3"] == "d"

    bench.run(scenario)


def test_what_another_job_holds_is_not_planned_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, needing(rollout=4), machines=0)

    async def scenario() -> None:
        bench.world.add_machine("full", cpu=8.0)
        bench.world.add_machine("free", cpu=5.0)
        bench.world.occupy("full", cpu=6.0)
        where = (await bench.scheduler.plans.fitted()).plan.machines()
        assert where["rollout-0"] == "free"
        assert list((await bench.scheduler.plans.fitted()).lacking) == ["rollout-1"]
        assert await bench.scheduler.places.room("rollout", 4) == 2
        bench.world.at(50.0, bench.world.occupy, "full")
        demands: list[set[str]] = []
        bench.world.at(40.0, lambda: demands.append({*bench.world.room.demands}))
        waits, _, started = await bench.start(1, vertex="rollout-1")
        assert (demands, bench.world.room.demands) == ([{"rollout-1"}], set())
        assert isinstance(waits, e.VertexWaitsForRoom)
        assert waits.required == "4 CPU, 0 bytes of memory on one machine"
        assert isinstance(started, e.VertexStarted)
        assert started.node == "full"
        assert 50.0 <= bench.clock.monotonic() < 52.0

    bench.run(scenario)


def test_one_that_lacks_room_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """They share a logical node, and the machine that held them all is gone."""
    bench = Bench(tmp_path, needing(rollout=4, reward=1), machines=0)

    async def scenario() -> None:
        bench.world.add_machine("small", cpu=1.0)
        [event] = await bench.start(1, vertex="reward-0")
        assert isinstance(event, e.VertexStarted)
        assert sorted((await bench.scheduler.plans.fitted()).lacking) == ["rollout-0", "rollout-1"]

    bench.run(scenario)


def test_a_job_with_a_bound_of_machines_begins_as_a_whole(tmp_path: Path) -> None:
    """The one machine that it may use is that on which all of it finds room, and not the first that comes."""
    spec = needing(rollout=4, reward=1)
    spec.node_num, spec.device_per_node = 1, 16
    bench = Bench(tmp_path, spec, machines=0)

    async def scenario() -> None:
        bench.world.add_machine("small", cpu=1.0)
        starts = [
            asyncio.ensure_future(bench.start(1, vertex=name))
            for name in ("reward-0", "rollout-0", "rollout-1")
        ]
        await asyncio.sleep(30.0)
        assert not any(start.done() for start in starts)
        assert not bench.alive
        bench.world.add_machine("large", cpu=16.0)
        machines = {
            event.node for start in starts for event in await start if isinstance(event, e.VertexStarted)
        }
        assert machines == {"large"}

    bench.run(scenario)


def test_a_bound_of_machines_is_kept(tmp_path: Path) -> None:
    spec = needing(rollout=4)
    spec.node_num, spec.device_per_node = 1, 8
    bench = Bench(tmp_path, spec, machines=0)

    async def scenario() -> None:
        bench.world.add_machine("a", cpu=4.0)
        bench.world.add_machine("b", cpu=4.0)
        lacking = (await bench.scheduler.plans.fitted()).lacking
        assert list(lacking) == ["rollout-1"]
        assert "a machine more than the 1 of node_num; 10.0.0.2 would have room" in str(lacking["rollout-1"])

    bench.run(scenario)


def test_vertices_wait_for_a_lost_store_as_long_as_the_job_says(tmp_path: Path) -> None:
    spec = small_spec()
    spec.store.lost_timeout_s = 7.0
    bench = Bench(tmp_path, spec)

    async def scenario() -> None:
        await bench.start(1, vertex="trainer-0")

    bench.run(scenario)
    (process,) = bench.world.alive
    assert process.binding is not None
    assert process.binding.store_hold_s == 7.0
