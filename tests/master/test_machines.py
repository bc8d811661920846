"""The master and the machines of its cluster: who is drained moves, who kills is left alone, and people are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gyre.config import Budget, Elastic, JobSpec
from gyre.errors import ConfigError, Conflict, NotFound
from gyre.failover import JobPhase
from tests.doubles.standing_job import StandingJob, small_spec
from tests.master.lives import Job

ROOMY = 64.0


def two_rollouts_a_machine(spec: JobSpec) -> None:
    """Nobody else needs CPUs, so that where the rollouts stand is decided by them alone."""
    spec.roles["rollout"].resources.cpu = ROOMY / 2
    spec.failover.machine = Budget(max=3, window_s=600)


@pytest.fixture
def standing() -> Iterator[StandingJob]:
    spec = small_spec()
    two_rollouts_a_machine(spec)
    with StandingJob(spec, nodes=2) as job:
        yield job


def where(job: StandingJob) -> dict[str, str]:
    return {one["id"]: one["node"] for one in job.view()["vertices"] if one["phase"] == "running"}


def all_run(view: dict[str, object]) -> bool:
    vertices = view["vertices"]
    assert isinstance(vertices, list)
    return all(one["phase"] == "running" for one in vertices)


@pytest.mark.parametrize("by_the_cluster", [True, False], ids=["the cluster's notice", "a person"])
def test_everybody_on_a_drained_machine_starts_on_another(
    standing: StandingJob, by_the_cluster: bool
) -> None:
    before = where(standing)
    source = before["rollout-0"]
    began = standing.clock.monotonic()
    if by_the_cluster:
        standing.do(standing.world.drain_machine, source)
    else:
        standing.command("drain", target=source[:6], reason="maintenance")
    told = standing.run_until(
        lambda view: any(one["phase"] == "stopping" or one["incarnation"] > 1 for one in view["vertices"])
    )
    assert standing.clock.monotonic() - began < 1.0, "within a second of the notice it begins to hand over"
    assert told["job"]["phase"] in ("running", "recovering")
    view = standing.run_until(lambda view: all_run(view) and source not in where_but_writers(view))
    assert view["job"]["phase"] == "running"
    assert all(vertex["restarts"] == 0 for vertex in view["vertices"])
    (drained,) = [node for node in standing.master.nodes() if node["draining"]]
    assert drained["id"] == source
    if not by_the_cluster:  # whose notice stands
        standing.command("undrain", target=source)
        assert not any(node["draining"] for node in standing.master.nodes())


def where_but_writers(view: dict[str, object]) -> set[str]:
    """The machines of those who do not stay with the file of their ledger."""
    vertices = view["vertices"]
    assert isinstance(vertices, list)
    return {one["node"] for one in vertices if one["role"] != "trainer"}


def test_a_vertex_that_is_drained_gives_its_place_back_and_waits_if_there_is_no_other() -> None:
    spec = small_spec()
    two_rollouts_a_machine(spec)
    spec.roles["rollout"].elastic = Elastic(min=1, max=4)
    with StandingJob(spec, nodes=1) as job:
        job.command("drain", target="rollout-1")
        view = job.run_until(lambda view: by_id(view, "rollout-1")["no_room"])
        assert "left alone or drained" in by_id(view, "rollout-1")["no_room"]
        assert view["job"]["phase"] == "running"
        assert "rollout-1" not in job.world.room.places
        job.do(job.world.add_machine, "node-9")
        view = job.run_until(all_run)
        assert by_id(view, "rollout-1")["node"] == "node-9"


def by_id(view: dict[str, object], vertex: str) -> dict[str, str]:
    vertices = view["vertices"]
    assert isinstance(vertices, list)
    return next(one for one in vertices if one["id"] == vertex)


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("rolout-1", NotFound, "did you mean 'rollout-1'"),
        ("node", ConfigError, "may be any of 2 machines"),
        ("trainer-0", Conflict, "the file of its ledger is there"),
    ],
)
def test_what_cannot_be_drained_is_refused(
    standing: StandingJob, target: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        standing.command("drain", target=target)


def test_a_machine_on_which_three_die_is_left_alone(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=60, change=two_rollouts_a_machine, nodes=2)
    bad: list[str] = []

    def kill_where_it_began() -> None:
        process = job.world.living("rollout-0")
        assert process is not None
        bad.append(process.node)
        if process.node == bad[0]:
            job.world.kill("rollout-0")

    for n in range(1, 7):
        job.world.at(5.0 * n, kill_where_it_began)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert bad[:3] == [bad[0]] * 3
    assert set(bad[3:]) == ({"node-0", "node-1"} - {bad[0]})
    [incident] = [one for one in job.incidents if one.cause == "bad_place"]
    assert incident.decision == f"leave machine {bad[0]} alone for 60 s"


def test_a_machine_that_fails_its_pre_flight_gets_nobody_until_it_is_mended() -> None:
    spec = small_spec()
    two_rollouts_a_machine(spec)
    spec.roles["rollout"].elastic = Elastic(min=1, max=4)
    with StandingJob(spec, nodes=1) as job:
        found = "GPU 1 has 7 uncorrected memory errors."
        job.do(lambda: job.world.add_machine("node-9", unfit=(found,)))

        def node() -> dict[str, object]:
            return next(one for one in job.master.nodes() if one["id"] == "node-9")

        later(job, 3.0)
        assert node()["found"] == found
        assert node()["left_until"]
        job.command("scale", role="rollout", count=4)
        view = job.run_until(lambda view: by_id(view, "rollout-3")["no_room"])
        assert view["job"]["phase"] == "running"
        assert "node-9" not in where(job).values()
        left = job.clock.time()
        job.do(job.world.make_unfit, "node-9")
        job.run_until(all_run)
        assert 30.0 < job.clock.time() - left < 70.0, "it was left alone for a minute, and examined again"
        assert "node-9" in where(job).values()
        later(job, 3.0)
        assert not node()["found"]


def later(job: StandingJob, seconds: float) -> None:
    until = job.clock.time() + seconds
    job.run_until(lambda view: job.clock.time() >= until)


def test_the_only_machine_is_never_left_alone(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=60, change=two_rollouts_a_machine, nodes=1)
    for n in range(1, 7):
        job.world.at(5.0 * n, job.world.kill, "rollout-0")
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert all(one.cause != "bad_place" for one in job.incidents)


def test_a_machine_that_comes_later_is_used_up_to_the_role_s_maximum(make_job: Callable[..., Job]) -> None:
    """The job was submitted for what there was, and says nothing of machines or devices."""

    def change(spec: JobSpec) -> None:
        two_rollouts_a_machine(spec)
        spec.roles["rollout"].elastic = Elastic(min=1, max=4)

    job = make_job(steps=40, change=change, nodes=1)
    life = job.life().at(5.0, lambda life: life.command("scale", role="rollout", count=4))
    seen: list[set[str]] = []
    job.world.at(15.0, job.world.add_machine, "node-1")
    job.world.at(
        19.0,
        lambda: seen.append(
            {process.node for process in job.world.alive if process.address.vertex == "rollout-3"}
        ),
    )
    life.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert seen == [{"node-1"}], "within seconds"
