"""The queue of jobs that wait for room which others hold: who is in it, and whom it holds back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.config import JobSpec
from gyre.config.spec import Elastic
from gyre.errors import StoreError
from gyre.failover import JobPhase, JobState
from gyre.failover import events as e
from gyre.master.room import RoomQueue
from gyre.store import QueuedJob
from gyre.testing.clock import VirtualClock, run_virtual
from tests.master.lives import Job, Life
from tests.master.test_vertex_scheduler import VERTEX, Bench, Queue, needing, runs, wants

EARLY, LATE = 1.0, 1e12
"""Before and after every job's own time."""


def queued(*since: float) -> Sequence[QueuedJob]:
    return [QueuedJob(f"other-{number}", f"other{number}", at) for number, at in enumerate(since)]


# -- the queue by itself ----------------------------------------------------------------------------


def first(jobs: Callable[[], Sequence[QueuedJob]], since: float | None = None) -> QueuedJob | None:
    clock = VirtualClock()
    queue = RoomQueue("me", Queue(jobs), None, clock)
    if since is not None:
        queue.wait(["rollout-0"], since)
    return run_virtual(queue.first(), clock)


def test_who_does_not_wait_yet_comes_last() -> None:
    [other] = jobs = queued(EARLY)
    assert first(lambda: jobs) == other
    assert first(lambda: ()) is None


def test_who_has_waited_longest_comes_first() -> None:
    jobs = queued(100.0, 300.0)
    assert first(lambda: jobs, since=99.0) is None
    assert first(lambda: jobs, since=200.0) == jobs[0]


@pytest.mark.parametrize(("name", "is_first"), [("a", True), ("z", False)])
def test_of_two_that_came_at_once_one_comes_first(name: str, is_first: bool) -> None:
    other = QueuedJob(name, name, 100.0)
    assert first(lambda: [other], since=100.0) == (other if is_first else None)


def test_nobody_comes_before_himself() -> None:
    """The store has what an earlier master of the job said."""
    assert first(lambda: [QueuedJob("me", "me", 50.0)], since=100.0) is None


def test_many_that_ask_at_once_are_answered_by_one_look_and_in_their_order() -> None:
    looks, order, clock = [], [], VirtualClock()
    queue = RoomQueue("me", Queue(lambda: looks.append(1) or ()), None, clock)  # type: ignore[func-returns-value]

    async def ask(number: int) -> None:
        await queue.first()
        order.append(number)

    async def all_of_them() -> None:
        await asyncio.gather(*map(ask, range(50)))

    run_virtual(all_of_them(), clock)
    assert (len(looks), order) == (1, list(range(50)))


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    def locked() -> Sequence[QueuedJob]:
        raise StoreError("database is locked")

    assert first(locked) is None


# -- the scheduler ----------------------------------------------------------------------------------


class Cluster(Bench):
    """Two machines of four CPUs, of which another job may hold one; and what the store says of other jobs."""

    def __init__(self, folder: Path, spec: JobSpec | None = None) -> None:
        super().__init__(folder, spec or needing(rollout=4), machines=0, queued=lambda: self.others)
        self.others: Sequence[QueuedJob] = ()
        for name in ("a", "b"):
            self.world.add_machine(name, cpu=4.0)

    def becomes(self, phase: JobPhase) -> None:
        self.state: JobState = replace(self.state, job=replace(self.state.job, phase=phase))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_job_that_comes_later_takes_no_room_before_an_earlier_one(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.others = queued(EARLY)
        since: list[float | None] = []
        cluster.world.at(40.0, lambda: since.append(cluster.scheduler.places.queued_since))
        cluster.world.at(50.0, setattr, cluster, "others", ())
        began = cluster.clock.time()
        waits, _, started = await cluster.start(1)
        assert isinstance(waits, e.VertexWaitsForRoom)
        assert "none before the job other0" in waits.available
        assert isinstance(started, e.VertexStarted)
        assert 50.0 <= cluster.clock.monotonic() < 53.0
        assert since == [pytest.approx(began, abs=0.1)], "it is in the queue itself, from when it came"
        assert cluster.scheduler.places.queued_since is None

    cluster.run(scenario)


def test_a_job_that_came_first_is_not_held_back(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.others = queued(LATE)
        [started] = await cluster.start(1)
        assert isinstance(started, e.VertexStarted)

    cluster.run(scenario)


def test_what_a_running_job_lost_comes_before_the_queue_and_what_it_would_like_after(
    cluster: Cluster,
) -> None:
    async def scenario() -> None:
        cluster.becomes(JobPhase.RUNNING)
        runs(cluster, rollout_1="b")
        cluster.others = queued(EARLY)
        cluster.say(2)
        [started] = await cluster.start(2)
        assert isinstance(started, e.VertexStarted)
        cluster.world.add_machine("c", cpu=4.0)
        assert await cluster.scheduler.places.room("rollout", 3) == 2
        cluster.others = ()
        cluster.clock.advance(2.0)
        assert await cluster.scheduler.places.room("rollout", 3) == 3

    cluster.run(scenario)


def test_a_job_asks_no_more_for_what_it_has_asked_when_an_earlier_one_appears(cluster: Cluster) -> None:
    """Ray would give it the room, which it was shown, as soon as there is any."""

    async def scenario() -> None:
        cluster.becomes(JobPhase.RUNNING)
        cluster.world.occupy("b", cpu=4.0)
        runs(cluster, rollout_0="a")
        wants(cluster, 2)
        demands: list[set[str]] = []
        for at in (10.0, 30.0):
            cluster.world.at(at, lambda: demands.append({*cluster.world.room.demands}))
        cluster.world.at(20.0, setattr, cluster, "others", queued(EARLY))
        cluster.world.at(40.0, overtake)
        await cluster.start(1, vertex="rollout-1")
        assert demands == [{"rollout-1"}, set()]

    def overtake() -> None:
        record = replace(cluster.state.vertices["rollout-1"], incarnation=2)
        cluster.state = replace(cluster.state, vertices={**cluster.state.vertices, "rollout-1": record})

    cluster.run(scenario)


def test_a_job_that_waits_for_machines_is_in_no_queue(tmp_path: Path) -> None:
    """No machine has eight CPUs, whoever ends."""
    cluster = Cluster(tmp_path, needing(rollout=8))

    async def scenario() -> None:
        since: list[float | None] = []
        cluster.world.at(20.0, lambda: since.append(cluster.scheduler.places.queued_since))
        cluster.world.at(30.0, lambda: cluster.world.add_machine("large", cpu=8.0))
        await cluster.start(1)
        assert since == [None]

    cluster.run(scenario)


@pytest.mark.parametrize("elastic", [False, True])
def test_who_can_be_done_without_waits_in_no_queue(tmp_path: Path, elastic: bool) -> None:
    spec = needing(rollout=4)
    spec.roles["rollout"].elastic = Elastic(min=1, max=4) if elastic else None
    cluster = Cluster(tmp_path, spec)

    async def scenario() -> None:
        cluster.becomes(JobPhase.RUNNING)
        cluster.world.occupy("a", cpu=4.0)
        cluster.world.occupy("b", cpu=4.0)
        since: list[bool] = []
        cluster.world.at(20.0, lambda: since.append(cluster.scheduler.places.queued_since is not None))
        cluster.world.at(30.0, cluster.world.occupy, "a")
        cluster.say(2)
        await cluster.start(2, vertex=VERTEX)
        assert since == [not elastic]

    cluster.run(scenario)


# -- the master -------------------------------------------------------------------------------------


def test_the_directory_says_who_is_in_the_queue_while_it_is(make_job: Callable[..., Job]) -> None:
    job = make_job(change=lambda spec: setattr(spec.roles["actor"].resources, "cpu", 25.0))
    job.world.occupy("node-0", cpu=50.0)
    rows = []

    def look(life: Life) -> None:
        row = job.store.job("small")
        rows.append((row.queued_since, [one.name for one in job.store.queue(None, job.clock.time())]))

    life = job.life()
    for at in (30.0, 200.0):
        life.at(at, look)
    job.world.at(250.0, job.world.occupy, "node-0")
    life.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert [queue for _, queue in rows] == [["small"]] * 2
    assert rows[0][0] == rows[1][0], "its place does not change while it waits"
    assert job.store.job("small").queued_since is None


def test_a_master_that_follows_keeps_the_place(make_job: Callable[..., Job]) -> None:
    job = make_job(change=lambda spec: setattr(spec.roles["actor"].resources, "cpu", 25.0))
    job.world.occupy("node-0", cpu=50.0)
    since: list[float | None] = []
    for at in (30.0, 100.0):
        job.life().at(at, lambda life: (since.append(job.store.job("small").queued_since), life.die())).run()
    assert since[0] is not None
    assert since[1] == pytest.approx(since[0], abs=1.0)
