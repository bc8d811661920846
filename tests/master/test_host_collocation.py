"""Roles collocated on hosts, under the real master: partners stay beside each other through restarts and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.config import JobSpec
from gyre.failover import events as e
from tests.doubles.standing_job import StandingJob, small_spec
from tests.master.test_vertex_scheduler import Bench, runs

HALF = 32.0
"""CPUs of a vertex: a machine of the fake cluster has twice as many."""


def pairs() -> JobSpec:
    """The small job with two rollouts, beside each a reward, each of which fills half a machine."""
    spec = small_spec()
    spec.roles["reward"].total = 2
    for name in ("rollout", "reward"):
        spec.roles[name].resources.cpu = HALF
    spec.affinity.collocate_hosts = [["rollout", "reward"]]
    return spec


def vertex(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in view["vertices"] if one["id"] == name)


def where(view: dict[str, Any], *names: str) -> list[str]:
    return [vertex(view, name)["node"] for name in names]


def all_run(view: dict[str, Any]) -> bool:
    return all(one["phase"] == "running" for one in view["vertices"])


def running(view: dict[str, Any]) -> set[str]:
    return {one["id"] for one in view["vertices"] if one["phase"] == "running"}


def have_moved(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Whether all run, and these as another process than at first."""
    return lambda view: all_run(view) and all(vertex(view, name)["incarnation"] > 1 for name in names)


def job_of_pairs(nodes: int = 2) -> StandingJob:
    return StandingJob(pairs(), nodes=nodes)


def test_each_pair_stands_on_a_machine_and_one_that_dies_comes_back_alone() -> None:
    with job_of_pairs(3) as job:
        view = job.view()
        assert where(view, "rollout-0", "rollout-1") == where(view, "reward-0", "reward-1")
        assert len({*where(view, "rollout-0", "rollout-1")}) == 2
        [before] = where(view, "rollout-0")
        job.do(job.world.kill, "rollout-0")
        view = job.run_until(have_moved("rollout-0"))
        assert where(view, "rollout-0", "reward-0") == [before, before]
        assert vertex(view, "reward-0")["incarnation"] == 1


def test_a_pair_leaves_a_drained_machine_for_one_that_holds_both() -> None:
    with job_of_pairs() as job:
        view = job.view()
        [before, other] = where(view, "rollout-0", "rollout-1")
        for name, cpu in (("small-1", HALF), ("small-2", HALF), ("big", 2 * HALF), ("small-3", HALF)):
            job.do(lambda name=name, cpu=cpu: job.world.add_machine(name, cpu=cpu))
        job.command("drain", target=before)
        view = job.run_until(have_moved("rollout-0", "reward-0"))
        assert where(view, "rollout-0", "reward-0") == ["big", "big"]
        assert where(view, "rollout-1", "reward-1") == [other, other]
        assert vertex(view, "reward-1")["incarnation"] == 1


def test_a_gang_and_its_partners_leave_a_drained_machine_together() -> None:
    spec = small_spec()
    for name in ("rollout", "actor"):
        spec.roles[name].resources.cpu = HALF
    spec.affinity.collocate_hosts = [["actor", "rollout"]]
    with StandingJob(spec, nodes=2) as job:
        view = job.view()
        before = where(view, "actor-0", "actor-1")
        assert before == where(view, "rollout-0", "rollout-1")
        for name, cpu in (("small-1", HALF), ("big", 2 * HALF), ("small-2", HALF)):
            job.do(lambda name=name, cpu=cpu: job.world.add_machine(name, cpu=cpu))
        job.command("drain", target=before[0])
        view = job.run_until(have_moved("rollout-0", "actor-0", "actor-1"))
        assert where(view, "actor-0", "rollout-0") == ["big", "big"]
        assert where(view, "actor-1", "rollout-1") == [before[1]] * 2
        assert vertex(view, "rollout-1")["incarnation"] == 1


def test_a_pair_whose_machine_is_lost_waits_for_one_that_holds_both() -> None:
    with job_of_pairs() as job:
        [before] = where(job.view(), "reward-0")
        for name in ("small-1", "small-2"):
            job.do(lambda name=name: job.world.add_machine(name, cpu=HALF))
        job.do(job.world.lose_machine, before)
        view = job.run_until(
            lambda view: all(vertex(view, name)["no_room"] for name in ("rollout-0", "reward-0"))
        )
        assert "reward-0 and rollout-0, beside each other" in vertex(view, "rollout-0")["no_room"]
        job.do(lambda: job.world.add_machine("big", cpu=2 * HALF))
        view = job.run_until(have_moved("rollout-0", "reward-0"))
        assert where(view, "rollout-0", "reward-0") == ["big", "big"]


def test_a_drained_vertex_waits_while_its_partner_stands_and_then_they_move_together() -> None:
    with job_of_pairs(4) as job:
        [before] = where(job.view(), "rollout-0")
        job.command("drain", target="rollout-0")
        view = job.run_until(lambda view: vertex(view, "rollout-0")["no_room"])
        assert "rollout-0 beside reward-0" in vertex(view, "rollout-0")["no_room"]
        assert vertex(view, "reward-0")["phase"] == "running"
        job.command("drain", target="reward-0")
        view = job.run_until(have_moved("rollout-0", "reward-0"))
        [after, same] = where(view, "rollout-0", "reward-0")
        assert after == same != before


def test_a_role_scales_to_numbers_that_give_no_whole_ranks() -> None:
    with job_of_pairs(4) as job:
        before = where(job.view(), "rollout-0", "reward-0", "rollout-1", "reward-1")
        job.command("scale", role="rollout", count=3)
        view = job.run_until(lambda view: running(view) >= {"rollout-2"})
        assert where(view, "rollout-0", "reward-0", "rollout-1", "reward-1") == before
        job.command("scale", role="rollout", count=1)
        job.run_until(lambda view: not running(view) & {"rollout-1", "rollout-2"})
        job.command("scale", role="rollout", count=2)
        view = job.run_until(lambda view: running(view) >= {"rollout-1"})
        assert where(view, "rollout-1") == where(view, "reward-1")


# -- starts -----------------------------------------------------------------------------------------


def test_a_start_waits_for_room_beside_the_partner_also_if_another_machine_has_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, pairs(), machines=3)

    async def scenario() -> None:
        runs(bench, reward_0="node-1", rollout_1="node-0", reward_1="node-0")
        bench.world.occupy("node-1", cpu=HALF)
        bench.world.at(100.0, bench.world.occupy, "node-1")
        waits, found, started = await bench.start(1)
        assert isinstance(waits, e.VertexWaitsForRoom)
        assert waits.required == "32 CPU, 0 bytes of memory for rollout-0 beside reward-0"
        assert waits.available == "10.0.0.2: 0 CPU, 274877906944 bytes on the machine of reward-0"
        assert found == e.VertexFoundRoom("rollout-0", 1)
        assert isinstance(started, e.VertexStarted)
        assert started.node == "node-1"
        assert 100.0 <= bench.clock.monotonic() < 105.0

    bench.run(scenario)


def test_who_starts_goes_where_its_partner_is_being_started(tmp_path: Path) -> None:
    """A process that loads a large model is there long before it runs, and machines come and go meanwhile."""
    bench = Bench(tmp_path, pairs(), machines=2)

    async def scenario() -> None:
        bench.world.setup_delay_s = 100.0
        first = asyncio.ensure_future(bench.start(1))
        await asyncio.sleep(20.0)
        bench.world.add_machine("aaa", cpu=1000.0)
        assert (await bench.scheduler.plans.fitted()).plan.machines()["rollout-0"] == "node-0"
        [second] = await bench.start(1, vertex="reward-0")
        assert isinstance(second, e.VertexStarted)
        [event] = await first
        assert isinstance(event, e.VertexStarted)
        assert event.node == second.node

    bench.run(scenario)


def test_a_place_that_was_taken_meanwhile_is_not_held_against_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path, pairs(), machines=2)

    def take() -> None:
        bench.world.occupy("node-0", cpu=2 * HALF)
        bench.world.no_room.clear()

    async def scenario() -> None:
        bench.world.no_room = {"rollout-0"}
        bench.world.at(10.0, take)
        *_, started = await bench.start(1)
        assert isinstance(started, e.VertexStarted)
        assert started.node == "node-1"

    bench.run(scenario)
