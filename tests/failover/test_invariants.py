"""The invariants that the coordinator names, each by its name; and what all of them give: a watchful witness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.config import Budget
from gyre.failover import Decision, JobPhase, Scope, VertexPhase
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import InvariantBroken
from gyre.sim import Witness
from tests.failover.histories import History, coordinator_of, spec_with


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
        e.Evaluated(1, version=999, accuracy=1.0, count=1, report=99),
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


@pytest.mark.parametrize("vertex", ["trainer-0", "actor-0", "rollout-0", "reward-0"])
@pytest.mark.parametrize("fault", ["dies", "does not start", "raises", "raises in setup"])
def test_every_repair_is_paid_for(vertex: str, fault: str) -> None:
    """No fault repeats for ever: within one window every one of them ends the job, after what its budgets allow."""
    small = Budget(max=2, window_s=1e9)
    spec = spec_with(vertex=small, region=small, job=small, user_error=small, retry=small)
    history = History(coordinator_of(spec)).submit().start_all()
    for _ in range(50):
        if history.state.job.phase is JobPhase.STOPPING:
            break
        number = history[vertex].incarnation
        if fault == "dies":
            history.lose(vertex)
        elif fault == "raises" and vertex == "trainer-0":
            history.report(e.TrainerFailed, error="no", traceback="", user_code=True)
        elif fault == "raises":
            history.fail_operator(vertex, user_code=True)
        else:
            if history[vertex].phase is VertexPhase.RUNNING:
                history.lose(vertex)
            history.decide(
                e.VertexStartFailed(
                    vertex, history[vertex].incarnation, error="no", user_code=fault.endswith("setup")
                )
            )
        if fault in ("dies", "raises") or history[vertex].incarnation > number:
            history.start_all()
    assert history.state.job.phase is JobPhase.STOPPING
    assert history.state.job.outcome is JobPhase.FAILED
    spent = {key.partition(":")[0]: uses for key, uses in history.state.uses.items()}
    assert all(len(uses) <= 2 for uses in spent.values())
    scopes = [incident.scope for incident in history.state.incidents.values()]
    assert scopes.count(Scope.GIVE_UP) == 1


def test_budgets_recover_with_time(history: History) -> None:
    history.start_all()
    for _ in range(100):
        history.now += history.coordinator.spec.failover.vertex.window_s
        history.lose("rollout-0")
        history.start_all()
    assert history.state.job.phase is JobPhase.RUNNING
    assert history.incident.scope is Scope.VERTEX


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
    restarted = {"phase": VertexPhase.STARTING, "incarnation": 3, "restarts": rollout.restarts + 1}
    for before, event, decision, name in (
        (state, late, with_vertex(message="x"), "old news is no news"),
        (state, lost, with_vertex(incarnation=9), "one repair at a time"),
        (state, lost, Decision(lower, (), frozenset({("job", "job")})), "the version never falls"),
        (over, lost, Decision(over, (c.FinishJob("x"),)), "ended is ended"),
        (state, lost, with_vertex(**restarted), "every repair is paid for"),
        (state, lost, Decision(state, (), frozenset({("job", "job")})), "changed is what differs"),
        (state, lost, with_vertex(phase=VertexPhase.STOPPED), "phases follow the table"),
    ):
        with pytest.raises(InvariantBroken, match=name):
            Witness(second.coordinator.spec).check(before, event, decision, now)
