"""The real master, its control loop and its SQLite journal, over a fake cluster in virtual time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from gyre.config import Budget, Elastic, JobSpec, WeightsSpec
from gyre.errors import Conflict
from gyre.failover import JobPhase, JobState, Reason, Scope, VertexPhase
from gyre.process_activity import Activity
from tests.doubles.fake_cluster import IDLE, STACK_OF_A_STALL, STARVED, WORKING
from tests.doubles.fake_connection import STACK_FROM_OUTSIDE
from tests.doubles.fault_injector import FaultInjector, FaultKind
from tests.doubles.standing_job import StandingJob
from tests.master.lives import Job, Life
from tests.store.fault_points import AFTER_COMMIT

SETTLED_S = 3.0
"""By then every vertex runs and the trainer has made a step or two."""


def test_a_job_runs_to_success(job: Job) -> None:
    life = job.run()
    assert life.master.view()["progress"].get("step") == 6, "whoever looks afterwards is told how far it came"
    assert job.phase is JobPhase.SUCCEEDED
    assert len(job.world.steps) == 6
    assert job.world.ended
    assert job.world.room.places == {}
    assert job.incidents == []
    assert job.state.job.result == {"steps": 6}


@pytest.mark.parametrize("vertex", ["trainer-0", "actor-1", "rollout-0", "reward-0"])
def test_a_vertex_of_any_role_may_be_killed(job: Job, vertex: str) -> None:
    job.world.at(SETTLED_S, job.world.kill, vertex)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    [incident] = job.incidents
    assert (incident.vertex, incident.cause, incident.outcome) == (vertex, "process_died", "recovered")
    assert incident.scope is (Scope.REGION if vertex.startswith("actor") else Scope.VERTEX)
    assert "SIGKILL" in incident.evidence["error"]
    assert len(job.world.steps) == 6


@pytest.mark.parametrize("at_s", [0.5, SETTLED_S], ids=["in its setup", "at work"])
def test_a_vertex_that_the_kernel_kills_for_its_memory_is_told_so(job: Job, at_s: float) -> None:
    job.world.at(at_s, job.world.kill_for_memory, "rollout-0")
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    [incident] = job.incidents
    assert (incident.vertex, incident.cause, incident.outcome) == ("rollout-0", "out_of_memory", "recovered")
    assert (
        "the kernel killed 1 process(es) of its control group for want of memory"
        in incident.evidence["error"]
    )
    assert "SIGKILL" in incident.evidence["error"]


def test_an_earlier_kill_for_memory_is_no_cause_of_a_later_death(job: Job) -> None:
    job.world.at(SETTLED_S, job.world.kill_for_memory, "rollout-0")
    job.world.at(SETTLED_S + 2.0, job.world.kill, "rollout-1")
    job.run()
    assert [one.cause for one in job.incidents] == ["out_of_memory", "process_died"]


def test_every_vertex_is_told_how_weights_travel(job: Job) -> None:
    job.run()
    for address in job.world.spawned:
        told = job.world.process(address.vertex, address.incarnation).binding
        assert told is not None
        assert WeightsSpec.model_validate(told.weights) == WeightsSpec(encrypt=False)


def test_roles_that_share_devices_are_told_of_each_other(make_job: Callable[..., Job]) -> None:
    def shared(spec: JobSpec) -> None:
        spec.affinity.collocate = [["actor", "reward"]]
        spec.roles["reward"].total = spec.roles["actor"].total

    job = make_job(change=shared)
    job.run()
    for role, others in (("actor", ["reward"]), ("reward", ["actor"]), ("rollout", [])):
        told = job.world.process(f"{role}-0", 1).binding
        assert told is not None
        assert [one["role"] for one in told.neighbours] == others


def test_the_ranks_of_a_gang_restart_together(job: Job) -> None:
    job.world.at(SETTLED_S, job.world.kill, "actor-1")
    job.run()
    assert [address.incarnation for address in job.world.spawned if address.vertex == "actor-0"] == [1, 2]
    assert job.world.process("actor-0", 2).binding is not None
    rendezvous = {job.world.process(f"actor-{rank}", 2).binding.master_port for rank in (0, 1)}  # type: ignore[union-attr]
    assert len(rendezvous) == 1


@pytest.mark.parametrize(
    "pair",
    [("rollout-0", "rollout-1"), ("trainer-0", "rollout-0"), ("actor-0", "actor-1"), ("actor-0", "reward-0")],
)
def test_two_vertices_may_be_killed_at_once(job: Job, pair: tuple[str, str]) -> None:
    for vertex in pair:
        job.world.at(SETTLED_S, job.world.kill, vertex)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    regions = 1 if pair == ("actor-0", "actor-1") else 2
    assert len(job.incidents) == regions
    assert all(incident.outcome == "recovered" for incident in job.incidents)


def test_setup_that_raises_ends_the_job_with_its_traceback(job: Job) -> None:
    job.world.fail_setup("reward-0", user_code=True, times=5)
    job.run()
    state = job.state.job
    assert (state.phase, state.reason) == (JobPhase.FAILED, "user_code")
    assert "mine.py" in state.error
    assert "reward-0" in state.message
    assert [incident.scope for incident in job.incidents] == [Scope.VERTEX, Scope.GIVE_UP]


def test_setup_that_raises_once_is_tried_again(job: Job) -> None:
    job.world.fail_setup("reward-0", user_code=True)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED


@pytest.mark.parametrize("vertex", ["rollout-0", "trainer-0", "actor-0"])
def test_a_hang_is_found_within_its_deadline(job: Job, vertex: str) -> None:
    job.world.at(SETTLED_S, job.world.hang, vertex)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    incident = job.incidents[0]
    silence_s = job.spec.failover.silence_timeout_s
    assert (incident.vertex, incident.cause) == (vertex, "silent")
    assert incident.evidence["stack"] == STACK_FROM_OUTSIDE
    assert incident.detected_after_s == pytest.approx(silence_s, abs=0.5)
    assert incident.at - job.clock.time() + job.clock.monotonic() <= SETTLED_S + silence_s + 2.0


VERTICES = ("trainer-0", "actor-0", "actor-1", "rollout-0", "rollout-1", "reward-0")


@pytest.mark.parametrize(
    "activity", [STARVED, WORKING, IDLE], ids=["its machine is busy", "it works in C", "it waits in C"]
)
def test_a_silent_process_that_is_well_is_no_incident(job: Job, activity: Activity) -> None:
    """All vertices are silent for longer than the timeout: nobody is restarted, the job goes on, and each silence is in
    the journal as the false alarm that it was."""
    busy_s = 1.5 * job.spec.failover.silence_timeout_s
    for vertex in VERTICES:
        job.world.at(SETTLED_S, job.world.hang, vertex, activity)
        job.world.at(SETTLED_S + busy_s, job.world.unhang, vertex)
    job.run()
    assert (job.phase, job.incidents) == (JobPhase.SUCCEEDED, [])
    assert {vertex: job.state.vertices[vertex].false_alarms for vertex in VERTICES} == dict.fromkeys(
        VERTICES, 1
    )
    told = [(event.kind, event.body["vertex"]) for event in job.events if event.kind.startswith("Vertex")]
    for vertex in VERTICES:
        assert told.count(("VertexFellSilent", vertex)) == told.count(("VertexHeardAgain", vertex)) == 1


def test_false_alarms_spend_nothing_of_what_a_death_may_cost(job: Job) -> None:
    """One after another, and then the vertex dies: it is repaired as if it had never been suspected."""
    silence_s, times = job.spec.failover.silence_timeout_s, 3
    seen: list[JobState] = []
    for turn in range(times):
        began_s = SETTLED_S + turn * (1.5 * silence_s + 2.0)
        job.world.at(began_s, job.world.hang, "reward-0", IDLE)
        job.world.at(began_s + 1.5 * silence_s, job.world.unhang, "reward-0")
    died_s = SETTLED_S + times * (1.5 * silence_s + 2.0)
    job.world.at(died_s, lambda: seen.append(job.state))
    job.world.at(died_s, job.world.kill, "reward-0")
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    [before] = seen
    assert before.vertices["reward-0"].false_alarms == times
    assert not any(before.uses.values())
    assert not any(before.attempts.values())
    [incident] = job.incidents
    assert (incident.vertex, incident.cause, incident.scope) == ("reward-0", "process_died", Scope.VERTEX)


@pytest.mark.parametrize(
    ("activity", "life", "said"),
    [
        (STARVED, "busy", "the machine does not let it run"),
        (WORKING, "busy", "its process works"),
        (IDLE, "hung", "could run, and does nothing"),
    ],
    ids=["its machine is busy", "it works in C", "it waits in C"],
)
def test_one_that_is_silent_for_ever_is_replaced_after_its_stall_timeout(
    job: Job, activity: Activity, life: str, said: str
) -> None:
    job.world.at(SETTLED_S, job.world.hang, "rollout-0", activity)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    [incident] = job.incidents
    assert (incident.vertex, incident.cause) == ("rollout-0", "silent")
    assert incident.evidence["life"] == life
    assert said in incident.evidence["error"]
    assert incident.detected_after_s == pytest.approx(job.spec.roles["rollout"].stall_timeout_s, abs=4.0)


def test_a_vertex_that_is_heard_again_by_the_next_master_is_no_longer_silent(job: Job) -> None:
    """The next master has to take from the journal that it is."""
    silent_s = job.spec.failover.silence_timeout_s
    job.world.at(SETTLED_S, job.world.hang, "reward-0", WORKING)
    job.life().at(SETTLED_S + silent_s + 3.0, lambda life: life.die()).run()
    assert job.state.vertices["reward-0"].silent == "busy"
    job.world.at(SETTLED_S + silent_s + 5.0, job.world.unhang, "reward-0")
    job.run()
    record = job.state.vertices["reward-0"]
    assert (record.silent, record.false_alarms, record.incarnation) == ("", 1, 1)
    assert [incident.vertex for incident in job.incidents] == ["master"]


def test_vertices_of_one_machine_that_hang_at_once_say_so(job: Job) -> None:
    for vertex in ("rollout-0", "rollout-1"):
        job.world.at(SETTLED_S, job.world.hang, vertex)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert len(job.incidents) == 2
    for incident in job.incidents:
        assert "2 of 6 vertices on" in incident.evidence["error"]


def test_a_master_that_stood_still_accuses_nobody(job: Job) -> None:
    """It is stopped for longer than the silence timeout, and so hears nobody; a vertex needs some seconds more."""
    silence_s = job.spec.failover.silence_timeout_s
    job.world.at(SETTLED_S, job.world.hang, "rollout-0")
    job.world.at(SETTLED_S + 1.0, job.clock.advance, 3 * silence_s)
    job.world.at(SETTLED_S + 1.0 + 3.5 * silence_s, job.world.unhang, "rollout-0")
    job.run()
    assert (job.phase, job.incidents) == (JobPhase.SUCCEEDED, [])


def test_a_stall_is_found_within_its_deadline(job: Job) -> None:
    job.world.at(SETTLED_S, job.world.stall, "rollout-0")
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    [incident] = job.incidents
    assert (incident.vertex, incident.cause) == ("rollout-0", "stalled")
    assert incident.evidence["stack"] == STACK_OF_A_STALL
    assert incident.detected_after_s == pytest.approx(20.0, abs=1.0)


def of_a_graph(spec: JobSpec) -> None:
    """The small job with the built-in trainer, for a graph of a recipe."""
    spec.recipe = "grpo"
    spec.failover.step_timeout_s = 60.0


@pytest.mark.parametrize(
    ("vertex", "scopes"), [("trainer-0", [Scope.VERTEX]), ("reward-0", [Scope.VERTEX, Scope.JOB])]
)
def test_a_job_whose_vertices_all_run_and_that_makes_no_step_is_an_incident(
    make_job: Callable[..., Job], vertex: str, scopes: list[Scope]
) -> None:
    job = make_job(steps=10, change=of_a_graph)
    job.world.at(SETTLED_S, job.world.deadlock, vertex)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert [(incident.cause, incident.scope) for incident in job.incidents] == [
        ("no_step", scope) for scope in scopes
    ]
    first = job.incidents[0]
    assert first.vertex == "trainer-0"
    assert first.detected_after_s == pytest.approx(60.0, abs=2.0)
    assert first.evidence["stack"] == "idle"
    assert first.evidence["trainer"] == {"step": job.world.steps[-1][0] - 8}
    assert all(incident.outcome == "recovered" for incident in job.incidents)


def test_a_job_that_never_steps_again_ends(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=10, change=of_a_graph)
    for half in range(6, 1000):  # sooner than any trainer makes its first step
        job.world.at(half / 2, job.world.deadlock, "trainer-0")
    job.run()
    assert job.phase is JobPhase.FAILED
    assert [incident.scope for incident in job.incidents] == [Scope.VERTEX, Scope.JOB, Scope.GIVE_UP]
    assert "no step after step" in job.state.job.message


def test_a_script_that_makes_no_step_is_left_alone_and_told_of(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=10, change=lambda spec: setattr(spec.failover, "step_timeout_s", 60.0))
    job.world.at(SETTLED_S, job.world.deadlock, "reward-0")
    job.world.at(100.0, job.world.kill, "reward-0")
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert [(i.cause, i.scope, i.outcome) for i in job.incidents] == [
        ("no_step", Scope.RETRY, "left alone"),
        ("process_died", Scope.VERTEX, "recovered"),
    ]


@pytest.mark.parametrize("gets_on", [False, True])
def test_a_gang_of_a_script_that_dies_again_and_again(make_job: Callable[..., Job], gets_on: bool) -> None:
    """It ends the job unless its script reports larger steps between, by `report_progress` alone."""
    job = make_job(steps=100)
    deaths = 13
    for half in range(2, 140 * (deaths + 1)):
        death, since = divmod(half, 140)
        job.world.at(half / 2, job.world.deadlock, "trainer-0")
        step = 3 if not gets_on else 10 * death + (since > 138)
        job.world.at(half / 2, job.world.say, "trainer-0", {"step": step})
    for death in range(1, deaths):
        job.world.at(70.0 * death, job.world.kill, "actor-0")
    job.run(limit_s=70.0 * deaths)
    scopes = [incident.scope for incident in job.incidents if incident.cause == "process_died"]
    if gets_on:
        assert job.phase is not JobPhase.FAILED
        assert scopes == [Scope.REGION] * (deaths - 1)
    else:
        assert job.phase is JobPhase.FAILED
        assert scopes == [Scope.REGION] * 3 + [Scope.JOB] * 2 + [Scope.GIVE_UP]
        assert "again and again, with no step between" in job.state.job.message


def test_a_step_that_a_script_reports_is_known_before_what_is_lost_after_it(
    make_job: Callable[..., Job],
) -> None:
    """Also one that was reported between two that are written."""
    job = make_job(steps=100)
    job.world.at(2.0, job.world.deadlock, "trainer-0")
    began_s, killed_s, pace_s = 15.0, 26.3, 0.2
    for step in range(1, 100):
        job.world.at(began_s + pace_s * step, job.world.say, "trainer-0", {"step": step})
    job.world.at(killed_s, job.world.kill, "actor-0")
    job.life().at(40.0, lambda life: life.die()).run()
    kinds = [event.kind for event in job.events]
    before = job.events[: kinds.index("VertexLost")]
    reported = [event.body["step"] for event in before if event.kind == "StepReported"]
    assert reported[-1] >= (killed_s - 1.0 - began_s) / pace_s, "what was heard a second before"


def test_a_failing_call_is_retried_without_a_restart(job: Job) -> None:
    job.world.fail_operator("reward-0", user_code=False)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert [incident.scope for incident in job.incidents] == [Scope.RETRY]


# -- commands ---------------------------------------------------------------------------------------


def test_a_paused_job_makes_no_step_until_it_is_resumed(job: Job) -> None:
    steps: list[int] = []
    life = job.life()
    life.at(SETTLED_S, lambda life: life.command("pause"))
    life.at(SETTLED_S + 1, lambda life: steps.append(len(job.world.steps)))
    life.at(SETTLED_S + 60, lambda life: steps.append(len(job.world.steps)))
    life.at(SETTLED_S + 60, lambda life: life.command("resume"))
    life.run()
    assert steps[0] == steps[1]
    assert job.phase is JobPhase.SUCCEEDED


def test_stop_lets_the_step_under_way_end(job: Job) -> None:
    job.life().at(SETTLED_S, lambda life: life.command("stop", reason="enough")).run()
    assert (job.phase, job.state.job.message) == (JobPhase.STOPPED, "enough")
    assert 0 < len(job.world.steps) < 6
    assert job.clock.monotonic() < SETTLED_S + 10


def test_stop_ends_a_trainer_that_does_not_listen(job: Job) -> None:
    job.world.at(SETTLED_S - 0.1, job.world.stall, "trainer-0")
    job.life().at(SETTLED_S, lambda life: life.command("stop")).run()
    assert job.phase is JobPhase.STOPPED
    assert job.clock.monotonic() < SETTLED_S + job.spec.failover.drain_timeout_s + 10


def test_scaling_up_and_down(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=30)
    counts: list[int] = []

    def count(_: Life) -> None:
        counts.append(sum(process.address.vertex.startswith("rollout") for process in job.world.alive))

    life = job.life()
    life.at(SETTLED_S, lambda life: life.command("scale", role="rollout", count=4))
    life.at(SETTLED_S + 5, count)
    life.at(SETTLED_S + 6, lambda life: life.command("scale", role="rollout", count=1))
    life.at(SETTLED_S + 12, count)
    life.at(SETTLED_S + 13, lambda life: life.command("scale", role="rollout", count=3))
    life.at(SETTLED_S + 20, count)
    life.run()
    assert counts == [4, 1, 3]
    assert job.phase is JobPhase.SUCCEEDED


def test_scaled_down_and_up_before_it_was_gone(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=30)
    life = job.life()
    life.at(SETTLED_S, lambda life: life.command("scale", role="rollout", count=1))
    life.at(SETTLED_S + 0.001, lambda life: life.command("scale", role="rollout", count=2))
    life.at(SETTLED_S + 10, lambda life: job.world.living("rollout-1") is not None or pytest.fail("not back"))
    life.run()
    assert job.state.vertices["rollout-1"].incarnation == 2
    assert job.phase is JobPhase.SUCCEEDED


# -- no room ----------------------------------------------------------------------------------------


def test_a_vertex_that_has_no_room_waits_for_it_and_spends_no_budget(job: Job) -> None:
    """Three times as long as it took to spend every budget when each minute without room was a failed start."""
    job.world.no_room = {"reward-0"}
    seen = []
    life = job.life().at(800.0, lambda life: seen.append(job.state))
    job.world.at(900.0, job.world.no_room.clear)
    life.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert not job.incidents
    assert not job.state.uses
    (state,) = seen
    waiting = state.vertices["reward-0"]
    assert waiting.no_room.startswith("required 1, available 0.")
    assert waiting.no_room_since - state.job.submitted_at < 6.0
    assert (state.job.phase, state.job.reason) == (JobPhase.STARTING, Reason.NO_ROOM)
    assert "no room for reward-0: required 1, available 0" in state.job.message


def test_a_master_that_dies_while_a_vertex_waits_changes_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(change=lambda spec: setattr(spec.failover, "wait_for_room_s", 900.0))
    job.world.no_room = {"actor-0"}
    job.life().at(400.0, lambda life: life.die()).run()
    before = job.state.vertices["actor-0"]
    job.run()
    assert before.no_room
    assert (job.phase, job.state.job.reason) == (JobPhase.FAILED, Reason.NO_ROOM)
    assert "actor-0: no room for 900 s" in job.state.job.message, "the deadline is that of the first master"


def test_the_waiting_for_what_a_job_cannot_do_without_has_an_end(make_job: Callable[..., Job]) -> None:
    job = make_job(change=lambda spec: setattr(spec.failover, "wait_for_room_s", 900.0))
    job.world.no_room = {"actor-0"}
    job.run()
    assert (job.phase, job.state.job.reason) == (JobPhase.FAILED, Reason.NO_ROOM)
    assert "actor-0: no room for 900 s: required 1, available 0" in job.state.job.message
    assert not job.state.uses


def test_an_elastic_role_goes_on_with_those_that_have_room_and_grows_when_there_is_more(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(steps=100, change=elastic_from_one)
    job.world.no_room = {"rollout-1"}
    seen = []
    life = job.life().at(50.0, lambda life: seen.append((job.state, len(job.world.steps))))
    job.world.at(60.0, job.world.no_room.clear)
    life.at(70.0, lambda life: seen.append((job.state, len(job.world.steps))))
    life.run()
    assert job.phase is JobPhase.SUCCEEDED
    (without, steps), (with_it, _) = seen
    assert (without.job.phase, without.job.reason) == (JobPhase.RUNNING, Reason.NO_ROOM)
    assert steps > 20, "it trains meanwhile"
    assert with_it.vertices["rollout-1"].phase is VertexPhase.RUNNING
    assert (with_it.job.phase, with_it.job.reason, with_it.job.message) == (JobPhase.RUNNING, Reason.NONE, "")
    assert not job.incidents


def elastic_from_one(spec: JobSpec) -> None:
    spec.roles["rollout"].elastic = Elastic(min=1, max=4)
    spec.failover.wait_for_room_s = 30.0  # which does not end what can be done without


def test_a_job_without_room_can_be_scaled_to_what_there_is(job: Job) -> None:
    job.world.no_room = {"rollout-1"}
    job.life().at(20.0, lambda life: life.command("scale", role="rollout", count=1)).run()
    assert job.phase is JobPhase.SUCCEEDED
    assert all(address.vertex != "rollout-1" for address in job.world.spawned)


def test_a_start_given_up_while_it_waited_for_room_starts_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=60)
    job.world.no_room = {"rollout-2"}
    life = job.life()
    life.at(SETTLED_S, lambda life: life.command("scale", role="rollout", count=3))
    life.at(SETTLED_S + 5, lambda life: life.command("scale", role="rollout", count=2))
    life.at(SETTLED_S + 10, lambda life: job.world.no_room.clear())
    life.at(SETTLED_S + 30, lambda life: job.world.living("rollout-2") is None or pytest.fail("a zombie"))
    life.run()
    assert job.phase is JobPhase.SUCCEEDED


def test_a_cluster_without_machines_is_waited_for(job: Job) -> None:
    job.world.lose_machine("node-0")
    job.world.at(5.0, job.world.add_machine, "node-1")
    life = job.run()
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED


# -- budgets ----------------------------------------------------------------------------------------


def small_budgets(spec: JobSpec) -> None:
    spec.failover.vertex = Budget(max=2, window_s=600)
    spec.failover.job = Budget(max=1, window_s=600)


def test_spent_budgets_widen_the_scope_and_end_the_job(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=1000, change=small_budgets)
    for n in range(8):
        job.world.at(5.0 + 20 * n, job.world.kill, "rollout-0")
    job.run()
    assert job.phase is JobPhase.FAILED
    assert [incident.scope for incident in job.incidents] == [
        Scope.VERTEX,
        Scope.VERTEX,
        Scope.JOB,
        Scope.GIVE_UP,
    ]


def test_a_restart_that_waits_is_overtaken_by_a_wider_one(make_job: Callable[..., Job]) -> None:
    """The start of incarnation 3 waits out its back-off when the whole job restarts: it must not start beside 4."""

    def slow(spec: JobSpec) -> None:
        spec.failover.vertex = Budget(max=2, window_s=600)
        spec.failover.backoff_s = 30.0

    job = make_job(steps=60, change=slow)
    job.world.at(3.0, job.world.kill, "rollout-0")
    job.world.at(6.0, job.world.hang, "rollout-0")
    job.world.at(6.0, job.world.kill, "reward-0")
    job.world.at(9.0, job.world.kill, "reward-0")
    job.world.at(44.0, job.world.kill, "reward-0")
    assert job.run().exit_code is None
    assert job.phase is JobPhase.SUCCEEDED


# -- the disk ---------------------------------------------------------------------------------------


def test_a_full_disk_suspends_deciding_and_loses_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=60)
    errors: list[str] = []
    steps: list[int] = []

    def fill(life: Life) -> None:
        life.full = True

    def empty(life: Life) -> None:
        errors.append(life.master.view()["store"]["error"])
        steps.append(len(job.world.steps))
        life.full = False

    life = job.life()
    life.at(SETTLED_S, fill).at(SETTLED_S + 30, empty).run()
    assert "No space" in errors[0]
    assert steps[0] > 25, "the data plane goes on"
    assert job.phase is JobPhase.SUCCEEDED
    assert [event.body["step"] for event in job.events if event.kind == "StepCompleted"] == list(range(1, 61))
    assert job.incidents == []


def test_a_master_that_dies_with_a_full_disk_has_acknowledged_nothing_that_is_lost(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(steps=30)

    def fill(life: Life) -> None:
        life.full = True

    job.life().at(SETTLED_S, fill).at(SETTLED_S + 15, lambda life: life.die()).run()
    written = job.kinds.count("StepCompleted")
    assert written < len(job.world.steps) - 10
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert [event.body["step"] for event in job.events if event.kind == "StepCompleted"] == list(range(1, 31))


# -- the master dies --------------------------------------------------------------------------------


def test_what_a_dead_master_wished_for_is_taken_back_by_the_next(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=60)
    wished: list[set[str]] = []
    first = job.life()
    first.at(SETTLED_S, lambda life: job.world.room.demands.add("rollout-3"))
    first.at(SETTLED_S + 1, lambda life: life.die()).run()
    second = job.life()
    second.at(SETTLED_S + 5, lambda life: wished.append(set(job.world.room.demands)))
    second.run()
    assert wished == [set()]
    assert job.phase is JobPhase.SUCCEEDED
    assert [incident.vertex for incident in job.incidents] == ["master"], "what is wanted kept its place"


def disturbed(job: Job) -> None:
    job.world.at(2.6, job.world.kill, "rollout-0")
    job.world.at(3.2, job.world.kill, "actor-1")


def script(life: Life) -> Life:
    return life.at(4.4, lambda life: life.command("scale", role="rollout", count=1))


def commit_points(life: Life) -> list[int]:
    return [n for n, point in enumerate(life.points) if point.endswith((".before_commit", ".after_commit"))]


@pytest.mark.slow
def test_the_master_may_die_at_every_commit(make_job: Callable[..., Job]) -> None:
    """Before and after each one. How commits are grouped depends on the threads, so a run may have one fewer."""
    whole = make_job(steps=5)
    disturbed(whole)
    points = commit_points(script(whole.life()).run())
    assert whole.phase is JobPhase.SUCCEEDED
    deaths = 0
    for n in points:
        job = make_job(steps=5)
        disturbed(job)
        seen = itertools.count()
        first = job.life(on_point=lambda _, n=n, seen=seen: next(seen) == n)
        script(first).run()
        if job.world.ended:
            continue
        deaths += 1
        job.clock.advance(1.5)
        second = job.run()
        assert second.exit_code is None, f"at {n}"
        assert job.phase is JobPhase.SUCCEEDED, f"at {n}: {job.state.job}"
        assert len(job.world.steps) == 5
        assert max(event.epoch for event in job.events) == job.state.job.epoch
        assert job.world.room.places == {}, f"at {n}"
        assert job.store.job("j1").phase == "succeeded", f"at {n}"
        assert job.store.job("j1").epoch > 1
    assert deaths > 40


def dying_at_the_next_commit(job: Job, verb: str) -> None:
    """A master that commits the command and dies before it does anything about it."""
    asked = False

    def ask(life: Life) -> object:
        nonlocal asked
        asked = True
        return life.command(verb)

    first = job.life(on_point=lambda point: asked and point == AFTER_COMMIT)
    first.at(SETTLED_S + 0.3, ask).run()
    assert asked
    assert not job.phase.ended


def test_a_stop_that_a_dying_master_has_committed_is_still_a_gentle_one(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=60)
    dying_at_the_next_commit(job, "stop")
    job.run()
    assert job.phase is JobPhase.STOPPED
    assert "stop_fit" in job.world.process("trainer-0", 1).told
    assert "TrainerFinished" in job.kinds


def test_a_pause_that_a_dying_master_has_committed_is_carried_out(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=10)
    dying_at_the_next_commit(job, "pause")
    second = job.life()
    steps: list[int] = []
    for at_s in (10.0, 40.0):
        second.at(at_s, lambda life: steps.append(len(job.world.steps)))
    second.at(40.0, lambda life: life.command("resume"))
    second.run()
    assert steps[0] == steps[1] < 10
    assert job.phase is JobPhase.SUCCEEDED


def test_vertices_outlive_their_master(job: Job) -> None:
    first = job.life().at(SETTLED_S, lambda life: life.die())
    first.run()
    job.clock.advance(60.0)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert len(job.world.spawned) == 6, "nothing was started again"
    assert [incident.vertex for incident in job.incidents] == ["master"]
    assert job.clock.monotonic() < 80


def test_what_died_while_there_was_no_master_is_repaired(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=10)
    job.life().at(SETTLED_S, lambda life: life.die()).run()
    job.world.kill("rollout-1")
    job.world.kill("trainer-0")
    job.clock.advance(5.0)
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert {incident.vertex for incident in job.incidents} == {"master", "rollout-1", "trainer-0"}


def test_reports_that_come_again_are_journaled_once(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=30)
    for n in range(1, 6):
        job.life().at(SETTLED_S + 3 * n, lambda life: life.die()).run()
    job.run()
    steps = [event.body["step"] for event in job.events if event.kind == "StepCompleted"]
    assert steps == list(range(1, 31))
    assert job.state.job.epoch == 6


def test_of_two_masters_the_older_is_fenced_and_exits(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=30)
    old = job.life()
    usurped: list[int] = []

    def usurp(life: Life) -> None:
        usurped.append(job.journal.take_over(now=job.clock.time(), pid=99))

    old.at(SETTLED_S, usurp).run()
    assert old.exit_code == 0
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert usurped == [2]
    assert job.state.job.epoch == 3
    assert {event.epoch for event in job.events} == {1, 3}


def test_a_vertex_refuses_a_master_of_an_older_epoch(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=30)
    old = job.life()

    def outrank(life: Life) -> None:
        process = job.world.living("rollout-0")
        assert process is not None
        process.epoch = 7

    old.at(SETTLED_S, outrank).run()
    assert old.exit_code == 0
    for process in job.world.alive:
        process.epoch = 1
    job.run()
    assert job.phase is JobPhase.SUCCEEDED


# -- anything at any time ---------------------------------------------------------------------------


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("seed", range(10))
def test_a_job_survives_random_faults(make_job: Callable[..., Job], seed: int) -> None:
    job = make_job(steps=40, change=generous)
    injector = FaultInjector(
        seed=seed,
        vertices=["trainer-0", "actor-0", "actor-1", "rollout-0", "rollout-1", "reward-0"],
        count=10,
        mean_gap_s=6.0,
        kinds=(FaultKind.KILL, FaultKind.HANG, FaultKind.STALL, FaultKind.FAIL_START),
        master_share=0.3,
    )
    injector.arm(job.world)
    for death_s in injector.master_deaths:
        life = job.life().at(death_s, lambda life: life.die())
        life.run()
        assert life.exit_code is None
        if job.phase.ended:
            break
        job.clock.advance(1.0)
    if not job.phase.ended:
        assert job.run().exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    assert len(job.world.steps) == 40
    assert [event.body["step"] for event in job.events if event.kind == "StepCompleted"] == list(range(1, 41))
    assert job.world.room.places == {}


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("seed", range(4))
def test_people_ask_while_processes_die(make_job: Callable[..., Job], seed: int) -> None:
    job = make_job(steps=10_000, change=generous)
    injector = FaultInjector(
        seed=seed, vertices=["trainer-0", "actor-1", "rollout-0", "reward-0"], count=12, mean_gap_s=8.0
    )
    injector.arm(job.world)
    life = job.life()
    for n in range(10):
        life.at(15.0 + 10 * n, partial(ask, "scale", role="rollout", count=1 + n % 4))
        life.at(18.0 + 10 * n, partial(ask, "pause" if n % 2 else "resume"))
    life.at(130.0, partial(ask, "resume")).at(160.0, partial(ask, "stop", reason="enough")).run()
    assert job.phase is JobPhase.STOPPED
    assert len(job.incidents) >= 5


async def ask(verb: str, life: Life, **body: Any) -> None:
    """Send a command, which the job's present state may refuse."""
    with contextlib.suppress(Conflict):
        await life.command(verb, **body)


def generous(spec: JobSpec) -> None:
    spec.failover.vertex = spec.failover.region = Budget(max=20, window_s=600)


def test_the_same_faults_give_the_same_events(make_job: Callable[..., Job]) -> None:
    histories = []
    for _ in range(2):
        job = make_job(steps=10)
        job.world.at(3.0, job.world.kill, "rollout-0")
        job.world.at(3.0, job.world.hang, "actor-0")
        job.run()
        histories.append([(event.kind, event.body.get("vertex"), round(event.at, 6)) for event in job.events])
    assert histories[0] == histories[1]


def test_who_waits_for_events_is_told_at_their_commit() -> None:
    with StandingJob() as job, ThreadPoolExecutor(1) as pool:
        for verb in ("pause", "resume", "pause"):  # a wait that begins after the commit shows nothing
            waiting = pool.submit(job.master.wait_for_events, after=job.view()["seq"], timeout_s=60.0)
            job.command(verb)
            assert waiting.result(30.0)
