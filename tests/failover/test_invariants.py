"""The invariants that the coordinator names, each by its name; and what all of them give: a watchful witness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.config import SPARE_ROLLOUT, Budget, JobSpec
from gyre.failover import Decision, JobPhase, Scope, VertexPhase
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import InvariantBroken
from gyre.graph.recipes import ROLLOUT_INSTANCE
from tests.failover.histories import History, coordinator_of, spec_with
from tests.failover.witness import Witness


def old_news(history: History) -> list[e.Event]:
    """News of the first incarnations, when every vertex is its second."""
    return [
        *(
            event
            for vertex in history.state.vertices
            for event in (
                e.VertexStarted(vertex, 1, pid=1, node="n0"),
                e.VertexStartFailed(vertex, 1, error="late", user_code=True),
                e.VertexLost(vertex, 1, "process_died"),
                e.VertexStopped(vertex, 1),
            )
        ),
        e.OperatorFailed(1, "reward-0", 1, "run", "late", "", user_code=True, report=99),
        e.OperatorFailed(2, "reward-0", 1, "run", "late", "", user_code=True),
        e.TrainerFinished(1, {}, report=99),
        e.TrainerFailed(1, "late", "", user_code=True, report=99),
        e.StepCompleted(1, step=999, version=999, report=99),
        e.WeightsPublished(1, version=999, step=999, checksum="", size_bytes=1, report=99),
        e.CheckpointCommitted(1, step=999, path="late", report=99),
        e.Evaluated(incarnation=1, version=999, accuracy=1.0, count=1, prompts=1, report=99),
    ]


@pytest.fixture
def second(history: History) -> History:
    """Every vertex runs as its second incarnation."""
    history.start_all()
    for vertex in ("trainer-0", "actor-0", "rollout-0", "rollout-1", "reward-0"):
        history.lose(vertex)
    return history.start_all()


def test_old_news_is_no_news(second: History) -> None:
    assert {record.incarnation for record in second.state.vertices.values()} == {2}
    for event in old_news(second):
        before = second.state
        decision = second.decide(event)
        assert decision == Decision(before), event


def test_a_report_that_comes_twice_is_old_news(second: History) -> None:
    trainer = second["trainer-0"]
    event = e.OperatorFailed(2, "reward-0", 2, "run", "no", "", user_code=False, report=trainer.reported + 1)
    assert not second.coordinator.is_repeated(second.state, event)
    second.decide(event)
    assert second.coordinator.is_repeated(second.state, event)
    assert second.decide(event) == Decision(second.state)


def test_one_repair_at_a_time(history: History) -> None:
    """A rank dies; its peers' collectives fail, its own death is told again, and the trainer sees errors."""
    history.start_all()
    started = [history.lose("actor-1")]
    for event in (
        e.VertexLost("actor-1", 1, "silent"),
        e.VertexLost("actor-0", 1, "process_died"),
        e.OperatorFailed(1, "actor-0", 1, "update", "gloo", "", user_code=False, report=1),
        e.OperatorFailed(1, "actor-0", 2, "update", "not set up", "", user_code=False, report=2),
    ):
        started.append(history.decide(event))
    regions = [x for decision in started for x in decision.commands if isinstance(x, c.StartRegion)]
    assert len(regions) == 1
    assert len(history.state.incidents) == 1
    assert {history[rank].incarnation for rank in ("actor-0", "actor-1")} == {2}


def test_the_version_never_falls(history: History) -> None:
    history.start_all()
    history.report(e.StepCompleted, step=7, version=7)
    history.report(e.WeightsPublished, version=7, step=7, checksum="", size_bytes=1)
    history.report(e.CheckpointCommitted, step=5, path="five")
    history.lose("trainer-0")
    history.start_all()
    history.report(e.StepCompleted, step=6, version=6)
    history.report(e.WeightsPublished, version=6, step=6, checksum="", size_bytes=1)
    history.report(e.CheckpointCommitted, step=4, path="four")
    job = history.state.job
    assert (job.step, job.version, job.checkpoint_step, job.checkpoint_path) == (7, 7, 5, "five")


@pytest.mark.parametrize("phase", [JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED])
def test_ended_is_ended(history: History, phase: JobPhase) -> None:
    history.start_all()
    if phase is JobPhase.SUCCEEDED:
        history.report(e.TrainerFinished, result={})
    elif phase is JobPhase.STOPPED:
        history.decide(e.StopRequested("x"))
        history.decide(e.TimerFired("drain"))
    else:
        for _ in range(4):
            history.fail_operator("reward-0", user_code=True)
            history.start_all()
    history.stop_all()
    assert history.state.job.phase is phase
    finishes = [x for x in history.commands if isinstance(x, c.FinishJob)]
    assert finishes == [c.FinishJob(phase.value)]
    for event in (
        *old_news(history),
        *(e.VertexLost(v.id, v.incarnation, "process_died") for v in history.state.vertices.values()),
        *(e.VertexStarted(v.id, v.incarnation, 1, "n0") for v in history.state.vertices.values()),
        e.ScaleRequested("rollout", 3),
        e.PauseRequested(),
        e.ResumeRequested(),
        e.StopRequested("again"),
        e.TimerFired("drain"),
        e.MasterStarted(2, pid=1, node="n0"),
    ):
        decision = history.decide(event)
        assert decision.commands == ()
        assert decision.state.job.phase is phase


FAULTS = ("dies", "does not start", "raises", "raises in setup")
QUICKLY_S, SLOWLY_S = 1.0, 7200.0
"""Time between two faults: well within every window of the defaults, and longer than all but those of days."""
HANDFUL = 10


@pytest.mark.parametrize("vertex", ["trainer-0", "actor-0", "rollout-0", "reward-0"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("gap_s", [QUICKLY_S, SLOWLY_S], ids=["quickly", "slowly"])
def test_no_fault_outlives_its_attempts(history: History, vertex: str, fault: str, gap_s: float) -> None:
    """With the budgets that jobs have, and however slowly it comes back, a fault that lets no step pass ends the job
    after a handful of attempts, with its own words first."""
    history.start_all().step()
    faults = 0
    while history.state.job.phase is not JobPhase.STOPPING:
        faults += 1
        assert faults <= HANDFUL
        history.now += gap_s
        history.fail(vertex, fault, attempt=faults)
    assert history.state.job.outcome is JobPhase.FAILED
    assert history.state.job.message.startswith(("no (", "process_died (", "ValueError: no ("))
    scopes = [incident.scope for incident in history.state.incidents.values()]
    assert scopes.count(Scope.GIVE_UP) == 1


@pytest.mark.parametrize("vertex", ["trainer-0", "actor-0", "rollout-0", "reward-0"])
def test_a_step_gives_attempts_back(history: History, vertex: str) -> None:
    """What fails now and then, and lets steps pass, is repaired as often as the windows allow."""
    history.start_all()
    for _ in range(50):
        for _ in range(3):
            history.now += SLOWLY_S
            history.fail(vertex, "dies")
        history.step()
        assert history.state.attempts == {}
    assert history.state.job.phase is JobPhase.RUNNING
    assert history.incident.scope is not Scope.JOB


def test_every_repair_is_paid_for(history: History) -> None:
    """The window is the limit of faults that let steps pass."""
    history.start_all()
    budget = history.coordinator.spec.failover.vertex
    for _ in range(budget.max):
        history.fail("reward-0", "dies")
        assert history.incident.scope is Scope.VERTEX
        history.step()
    history.fail("reward-0", "dies")
    assert history.incident.scope is Scope.JOB


@pytest.mark.parametrize("why", ["paused", "another vertex waits for room", "tokens were generated"])
def test_what_cannot_make_progress_spends_no_attempts(why: str) -> None:
    history = History(coordinator_of(with_instances())).submit().start_all()
    history.step()
    if why == "paused":
        history.decide(e.PauseRequested())
    elif why == "another vertex waits for room":
        history.lose("rollout-1")
        history.decide(e.VertexWaitsForRoom("rollout-1", 2, "a GPU", "none"))
    before = history.state.attempts
    for _ in range(30):
        history.now += SLOWLY_S
        generated = why == "tokens were generated"
        record = history["rollout-0"]
        history.decide(e.VertexLost(record.id, record.incarnation, "process_died", generated=generated))
        history.start("rollout-0")
    assert history.state.attempts == before
    assert history.incident.scope is Scope.VERTEX


def test_starts_that_fail_are_attempts_also_while_the_job_is_paused(history: History) -> None:
    history.start_all().step()
    history.decide(e.PauseRequested())
    for _ in range(HANDFUL):
        history.now += SLOWLY_S
        history.fail("reward-0", "does not start")
    assert history.state.job.outcome is JobPhase.FAILED


@pytest.mark.parametrize("gap_s", [QUICKLY_S, SLOWLY_S], ids=["quickly", "slowly"])
def test_machines_that_are_taken_away_are_no_failures_of_the_job(gap_s: float) -> None:
    """They widen no repair and end nothing; those that go quickly are replaced as often as the window allows."""
    history = History(coordinator_of(with_instances())).submit().start_all()
    budget = history.coordinator.spec.failover.vertex
    starts: list[float] = []
    for _ in range(40):
        history.now += gap_s
        decision = history.lose("rollout-0", "node_lost")
        (start,) = (one for one in decision.commands if isinstance(one, c.StartRegion))
        starts.append(max(history.now, start.not_before))
        history.now = starts[-1]
        history.start("rollout-0")
    assert {incident.scope for incident in history.state.incidents.values()} == {Scope.VERTEX}
    for at in starts:
        assert len([one for one in starts if at <= one < at + budget.window_s]) <= budget.max + 1


@pytest.mark.parametrize("fault", ["dies", "does not start", "raises in setup"])
def test_a_spare_that_keeps_dying_ends_nothing(fault: str) -> None:
    spec = with_instances()
    spec.roles[SPARE_ROLLOUT] = spec.roles["rollout"].model_copy(update={"total": 1})
    history = History(coordinator_of(spec)).submit().start_all()
    before = {record.id: record.incarnation for record in history.state.vertices.values()}
    for _ in range(40):
        history.now += QUICKLY_S
        history.fail(f"{SPARE_ROLLOUT}-0", fault)
    assert {incident.scope for incident in history.state.incidents.values()} == {Scope.VERTEX}
    after = {record.id: record.incarnation for record in history.state.vertices.values()}
    assert {name for name in before if before[name] != after[name]} == {f"{SPARE_ROLLOUT}-0"}
    assert not history.state.job.phase.ended


@pytest.mark.parametrize("vertex", ["trainer-0", "actor-0", "rollout-0"])
@pytest.mark.parametrize("fault", ["dies", "does not start"])
@pytest.mark.parametrize("gap_s", [QUICKLY_S, SLOWLY_S], ids=["quickly", "slowly"])
def test_a_script_that_reports_no_step_has_attempts_of_its_own(vertex: str, fault: str, gap_s: float) -> None:
    """More of them, since nobody sees whether it makes progress; but not for ever."""
    # The window is no limit here, and their own attempts are fewer than a silent script's.
    spec = spec_with(
        vertex=Budget(max=1000, window_s=1, attempts=5), region=Budget(max=1000, window_s=1, attempts=3)
    )
    history = History(coordinator_of(spec)).submit().start_all()
    faults = 0
    while history.state.job.phase is not JobPhase.STOPPING:
        faults += 1
        assert faults <= 100
        history.now += gap_s
        history.fail(vertex, fault)
    assert faults == spec.failover.silent_attempts + spec.failover.job.max + 1
    assert history.state.job.outcome is JobPhase.FAILED
    if gap_s == SLOWLY_S:  # else it is the job's window that ended it
        assert "report_progress(step=…)" in history.state.job.message


def test_a_script_is_judged_by_the_steps_that_it_reports(history: History) -> None:
    history.start_all()
    for step in range(1, 50):
        history.now += SLOWLY_S
        history.fail("actor-0", "dies")
        history.decide(e.StepReported(step))
        assert history.state.attempts == {}
    assert (history.state.job.phase, history.state.job.step) == (JobPhase.RUNNING, 49)
    faults = 0
    while history.state.job.phase is not JobPhase.STOPPING:
        faults += 1
        assert faults <= HANDFUL
        history.now += SLOWLY_S
        history.fail("actor-0", "dies")
        history.decide(e.StepReported(49 - faults % 2))  # what it did before is no progress
    assert history.state.job.outcome is JobPhase.FAILED


def test_a_scripts_exceptions_have_their_own_budget(history: History) -> None:
    history.start_all()
    for _ in range(2):
        history.now += SLOWLY_S
        history.fail("trainer-0", "raises")
    assert history.state.job.outcome is JobPhase.FAILED


def with_instances() -> JobSpec:
    """The small job whose rollouts are instances of the rollout plane."""
    spec = spec_with()
    spec.roles["rollout"].entrypoint = ROLLOUT_INSTANCE
    spec.roles["rollout"].elastic = None
    return spec


# -- the witness sees what is broken ----------------------------------------------------------------


def test_the_witness_names_what_is_broken(second: History) -> None:
    state, now = second.state, second.now
    job = state.job
    rollout = state.vertices["rollout-0"]

    def with_vertex(**fields: object) -> Decision:
        vertices = {**state.vertices, "rollout-0": replace(rollout, **fields)}  # type: ignore[arg-type]
        return Decision(replace(state, vertices=vertices), (), frozenset({("vertex", "rollout-0")}))

    lost = e.VertexLost("rollout-0", rollout.incarnation, "process_died")
    late = e.VertexLost("rollout-0", 1, "process_died")
    lower = replace(state, job=replace(job, version=job.version - 1))
    over = replace(state, job=replace(job, phase=JobPhase.FAILED))
    outlived = replace(state, uses={**state.uses, "job": (now,)}, attempts={"job": 9})
    restarted = {"phase": VertexPhase.STARTING, "incarnation": 3, "restarts": rollout.restarts + 1}
    for before, event, decision, name in (
        (state, late, with_vertex(message="x"), "old news is no news"),
        (state, lost, with_vertex(incarnation=9), "one repair at a time"),
        (state, lost, Decision(lower, (), frozenset({("job", "job")})), "the version never falls"),
        (over, lost, Decision(over, (c.FinishJob("x"),)), "ended is ended"),
        (state, lost, with_vertex(**restarted), "every repair is paid for"),
        (
            state,
            lost,
            Decision(outlived, (), frozenset({("budget", "job")})),
            "no fault outlives its attempts",
        ),
        (state, lost, Decision(state, (), frozenset({("job", "job")})), "changed is what differs"),
        (state, lost, with_vertex(phase=VertexPhase.STOPPED), "phases follow the table"),
    ):
        with pytest.raises(InvariantBroken, match=name):
            Witness(second.coordinator.spec).check(before, event, decision, now)
