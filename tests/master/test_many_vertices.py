"""What the start of a vertex costs does not grow with the number of vertices that the job has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gyre.config import JobSpec
from gyre.failover import FailoverCoordinator, JobState
from gyre.failover import events as e
from gyre.failover import vertices as vertices_module
from gyre.failover.handlers import startup
from gyre.graph import compile_job, elements
from gyre.master import places, room
from gyre.master.room import WholeStart
from gyre.testing.clock import run_virtual
from tests.doubles.standing_job import small_spec
from tests.master.test_vertex_scheduler import Bench
from tests.operations import lines_of

FEW, MANY = 40, 240
SAME = 1.3
"""Times what each costs where there are few: a little more for whoever is first, nothing for the others."""


def spec_of(rollouts: int) -> JobSpec:
    spec = small_spec()
    spec.roles["rollout"].total, spec.roles["rollout"].elastic = rollouts, None
    return spec


def times_each(lines: dict[int, int]) -> float:
    """What one of many costs, compared with one of few."""
    return (lines[MANY] / MANY) / (lines[FEW] / FEW)


def test_who_waits_for_the_others_is_woken_once() -> None:
    async def begin(whole: WholeStart, name: str) -> None:
        whole.ask([name])
        await asyncio.sleep(0.1 * (int(name) % 7))
        whole.placed([name])
        assert await whole.missing(10.0) == []
        whole.leave([name])

    async def begin_all(count: int) -> None:
        whole = WholeStart()
        await asyncio.gather(*(begin(whole, str(number)) for number in range(count)))

    lines = {
        count: lines_of(lambda count=count: run_virtual(begin_all(count)), room)  # type: ignore[misc]
        for count in (FEW, MANY)
    }
    assert times_each(lines) < SAME


def test_a_place_costs_what_its_own_sub_graph_does(tmp_path: Path) -> None:
    def start_all(count: int) -> None:
        bench = Bench(tmp_path, spec_of(count), machines=0)
        bench.world.add_machine("a", cpu=10.0 * count)

        async def scenario() -> None:
            names = [f"rollout-{rank}" for rank in range(count)]
            for events in await asyncio.gather(*(bench.start(1, vertex=name) for name in names)):
                assert [type(event) for event in events] == [e.VertexStarted]

        bench.run(scenario)

    lines = {
        count: lines_of(lambda count=count: start_all(count), places, elements)  # type: ignore[misc]
        for count in (FEW, MANY)
    }
    assert times_each(lines) < SAME


@pytest.mark.parametrize("is_in_order", [True, False], ids=["in order", "every seventh first"])
def test_whether_all_run_is_not_asked_of_all_each_time(is_in_order: bool) -> None:
    lines = {}
    for count in (FEW, MANY):
        compiled = compile_job(spec_of(count))
        coordinator = FailoverCoordinator(compiled.spec, compiled.graph.region_or_alone)
        roles = {name: role.total for name, role in compiled.spec.roles.items()}
        state = coordinator.decide(JobState(), e.JobSubmitted("j1", "small", roles), 0.0).state
        names = list(state.vertices)
        if not is_in_order:
            names = [name for first in range(7) for name in names[first::7]]

        def start_all(coordinator: FailoverCoordinator, state: JobState, names: list[str]) -> None:
            for pid, name in enumerate(names, 1):
                state = coordinator.decide(state, e.VertexStarted(name, 1, pid, "a"), 1.0).state
            assert state.job.trainer_started

        work = (coordinator, state, names)
        lines[count] = lines_of(lambda work=work: start_all(*work), startup, vertices_module)  # type: ignore[misc]
    assert times_each(lines) < SAME if is_in_order else times_each(lines) < 2
