"""A job begins as a whole: nobody starts while other jobs hold the room of somebody whom the job needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.config.spec import Elastic
from gyre.failover import JobPhase
from gyre.failover import events as e
from gyre.master.room import WholeStart
from gyre.store import QueuedJob
from gyre.testing.clock import VirtualClock, run_virtual
from tests.master.test_vertex_scheduler import Bench, needing, wants

EARLIER = (QueuedJob("other", "other", 1.0),)
"""A job that has waited for longer than any other can have."""


class Cluster(Bench):
    """Two machines of four CPUs; each rollout needs one of them."""

    def __init__(self, folder: Path, elastic: Elastic | None = None) -> None:
        spec = needing(rollout=4)
        spec.roles["rollout"].elastic = elastic
        super().__init__(folder, spec, machines=0, queued=lambda: self.others)
        self.others: Sequence[QueuedJob] = ()
        for name in ("a", "b"):
            self.world.add_machine(name, cpu=4.0)

    async def start_all(self, rollouts: int = 2, incarnation: int = 1) -> dict[str, list[e.Event]]:
        """Start all rollouts at the same time. Returns the events of each."""
        names = [f"rollout-{rank}" for rank in range(rollouts)]
        came = await asyncio.gather(*(self.start(incarnation, vertex=name) for name in names))
        return dict(zip(names, came, strict=True))

    def when(self, at: float) -> dict[str, list[str]]:
        """What there is at that moment, once it has come."""
        seen: dict[str, list[str]] = {}
        self.world.at(
            at,
            lambda: seen.update(
                alive=sorted(one.vertex for one in self.alive), places=sorted(self.world.room.places)
            ),
        )
        return seen


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_nobody_starts_before_everybody_has_a_place(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.world.occupy("b", cpu=4.0)
        before = cluster.when(20.0)
        cluster.world.at(30.0, cluster.world.occupy, "b")
        events = await cluster.start_all()
        assert before == {"alive": [], "places": ["rollout-0"]}, "it keeps what it has, and uses none of it"
        assert [type(one) for one in events["rollout-0"]] == [e.VertexStarted], (
            "only who has no room tells it"
        )
        assert [type(one) for one in events["rollout-1"]] == [
            e.VertexWaitsForRoom,
            e.VertexFoundRoom,
            e.VertexStarted,
        ]
        assert cluster.clock.monotonic() < 33.0

    cluster.run(scenario)


def test_room_that_goes_between_the_look_and_the_taking_is_seen(cluster: Cluster) -> None:
    """Two jobs look at the same moment, and both see room for everybody."""

    async def scenario() -> None:
        cluster.world.no_room.add("rollout-1")
        before = cluster.when(3.0)
        cluster.world.at(4.0, cluster.world.no_room.clear)
        await cluster.start_all()
        assert before == {"alive": [], "places": ["rollout-0"]}

    cluster.run(scenario)


def test_what_was_taken_is_given_back_to_a_job_that_came_first(cluster: Cluster) -> None:
    """Else two jobs that begin at once would each hold a half for ever."""

    async def scenario() -> None:
        cluster.world.occupy("b", cpu=4.0)
        cluster.world.at(10.0, setattr, cluster, "others", EARLIER)
        before, after = cluster.when(9.0), cluster.when(20.0)
        cluster.world.at(30.0, setattr, cluster, "others", ())
        cluster.world.at(30.0, cluster.world.occupy, "b")
        await cluster.start_all()
        assert (before["places"], after["places"]) == (["rollout-0"], [])
        assert len(cluster.alive) == 2

    cluster.run(scenario)


def test_for_a_machine_that_nobody_has_the_others_do_not_wait(cluster: Cluster) -> None:
    async def scenario() -> None:
        wants(cluster, 3)
        before = cluster.when(20.0)
        cluster.world.at(30.0, lambda: cluster.world.add_machine("c", cpu=4.0))
        await cluster.start_all(3)
        assert before["alive"] == ["rollout-0", "rollout-1"]

    cluster.run(scenario)


def test_whom_the_job_can_do_without_comes_last_and_holds_nobody_up(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Elastic(min=1, max=2))

    async def scenario() -> None:
        cluster.world.occupy("b", cpu=4.0)
        before = cluster.when(20.0)
        cluster.world.at(30.0, cluster.world.occupy, "b")
        await cluster.start_all()
        assert before["alive"] == ["rollout-0"]

    cluster.run(scenario)


def test_whom_the_job_can_do_without_takes_no_room_before_those_it_needs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Elastic(min=1, max=2))

    async def scenario() -> None:
        cluster.world.no_room.add("rollout-0")
        before = cluster.when(3.0)
        cluster.world.at(4.0, cluster.world.no_room.clear)
        await cluster.start_all()
        assert before == {"alive": [], "places": []}
        assert len(cluster.alive) == 2

    cluster.run(scenario)


def test_who_is_overtaken_holds_nobody_up(cluster: Cluster) -> None:
    """The one without room is scaled away: the other needs it no more."""

    async def scenario() -> None:
        cluster.world.occupy("b", cpu=4.0)

        def scale_down() -> None:
            vertices = {name: one for name, one in cluster.state.vertices.items() if name != "rollout-1"}
            job = replace(cluster.state.job, roles={**cluster.state.job.roles, "rollout": 1})
            cluster.state = replace(cluster.state, job=job, vertices=vertices)

        cluster.world.at(20.0, scale_down)
        await cluster.start_all()
        assert [one.vertex for one in cluster.alive] == ["rollout-0"]
        assert cluster.clock.monotonic() < 24.0

    cluster.run(scenario)


def test_a_job_that_runs_starts_whom_it_can(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.state = replace(cluster.state, job=replace(cluster.state.job, phase=JobPhase.RUNNING))
        cluster.world.occupy("b", cpu=4.0)
        before = cluster.when(20.0)
        cluster.world.at(30.0, cluster.world.occupy, "b")
        await cluster.start_all()
        assert before["alive"] == ["rollout-0"]

    cluster.run(scenario)


def test_of_whom_nothing_is_known_in_time_counts_as_without() -> None:
    clock, whole = VirtualClock(), WholeStart()

    async def scenario() -> None:
        whole.ask(["a", "b", "c"])
        whole.placed(["a", "nobody"])
        whole.without_room(["b"])
        assert await whole.missing(10.0) == ["b", "c"]
        assert clock.monotonic() == pytest.approx(10.0)
        whole.leave(["b", "c"])
        assert await whole.missing(10.0) == []
        assert clock.monotonic() == pytest.approx(10.0)

    run_virtual(scenario(), clock)
