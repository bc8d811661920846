"""For each phase and event: which phase follows, which commands, which incident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gyre.config import Budget
from gyre.errors import NOT_FINITE, OUT_OF_MEMORY, ConfigError, Conflict, NotFound
from gyre.failover import FailoverCoordinator, JobPhase, Reason, Scope, VertexPhase
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft, InvariantBroken
from gyre.failover.handlers.training_progress import KEPT_EVALUATIONS, is_known_evaluation
from gyre.failover.state import VERTEX_TRANSITIONS
from tests.failover.histories import History, coordinator_of, spec_with

Step = Callable[[History], object]


def starting(history: History) -> None:
    """Nothing runs yet."""


def running(history: History) -> None:
    history.start_all()


def recovering(history: History) -> None:
    running(history)
    history.lose("rollout-0")


def paused(history: History) -> None:
    running(history)
    history.decide(e.PauseRequested())


def stopping(history: History) -> None:
    running(history)
    history.decide(e.StopRequested("enough"))


def draining(history: History) -> None:
    """A rollout was scaled away and is not gone yet."""
    running(history)
    history.decide(e.ScaleRequested("rollout", 1))


def without_trainer(history: History) -> None:
    running(history)
    history.lose("trainer-0")


def ended(history: History) -> None:
    running(history)
    history.report(e.TrainerFinished, result={})
    history.stop_all()


@dataclass
class Row:
    given: Step
    when: Step
    phase: JobPhase
    commands: list[str]
    incident: tuple[str, Scope] | None = None
    vertex: tuple[str, VertexPhase] | None = None


def advice(seen: int, count: int, *, role: str = "rollout", possible: int | None = None) -> e.ScaleAdvised:
    return e.ScaleAdvised("rollout_manager-0", 1, role, seen, count, "Samples wait.", possible=possible)


P, V = JobPhase, VertexPhase
STOP_ALL = ["StopVertex"] * 6
OPERATOR = "operator"

ROWS = {
    "one of many comes up": Row(
        starting, lambda h: h.start("rollout-0"), P.STARTING, [], None, ("rollout-0", V.RUNNING)
    ),
    "the last comes up": Row(starting, lambda h: h.start_all(), P.RUNNING, ["StartTrainer"]),
    "no room at first": Row(
        starting,
        lambda h: h.decide(e.VertexWaitsForRoom("reward-0", 1, "8 CPU", "2 CPU")),
        P.STARTING,
        ["SetTimer"],
        None,
        ("reward-0", V.STARTING),
    ),
    "set-up fails": Row(
        starting,
        lambda h: h.decide(e.VertexStartFailed("reward-0", 1, error="no library")),
        P.STARTING,
        ["StartRegion"],
        ("start_failed", Scope.VERTEX),
        ("reward-0", V.STARTING),
    ),
    "setup raises": Row(
        starting,
        lambda h: h.decide(e.VertexStartFailed("reward-0", 1, error="no", user_code=True)),
        P.STARTING,
        ["StartRegion"],
        ("user_code", Scope.VERTEX),
    ),
    "stopped before it ran": Row(starting, lambda h: h.decide(e.StopRequested("x")), P.STOPPING, STOP_ALL),
    "paused before it ran": Row(starting, lambda h: h.decide(e.PauseRequested()), P.STARTING, []),
    "a rollout dies": Row(
        running,
        lambda h: h.lose("rollout-0"),
        P.RECOVERING,
        ["UpdateMembership", "StartRegion"],
        ("process_died", Scope.VERTEX),
        ("rollout-0", V.STARTING),
    ),
    "a rank of the gang dies": Row(
        running,
        lambda h: h.lose("actor-1", "stalled"),
        P.RECOVERING,
        ["UpdateMembership", "StartRegion"],
        ("stalled", Scope.REGION),
        ("actor-0", V.STARTING),
    ),
    "the trainer dies": Row(
        running,
        lambda h: h.lose("trainer-0", "silent"),
        P.RECOVERING,
        ["StartRegion"],
        ("silent", Scope.VERTEX),
        ("trainer-0", V.STARTING),
    ),
    "a call fails": Row(
        running, lambda h: h.fail_operator("reward-0"), P.RUNNING, [], ("call_failed", Scope.RETRY)
    ),
    "user code raises": Row(
        running,
        lambda h: h.fail_operator("reward-0", user_code=True),
        P.RUNNING,
        [],
        ("user_code", Scope.RETRY),
    ),
    "a collective fails": Row(
        running,
        lambda h: h.fail_operator("actor-0"),
        P.RECOVERING,
        ["UpdateMembership", "StartRegion"],
        ("collective_failed", Scope.REGION),
    ),
    "fit raises": Row(
        running,
        lambda h: h.report(e.TrainerFailed, error="no", traceback="", user_code=False),
        P.RECOVERING,
        ["StartRegion"],
        ("call_failed", Scope.VERTEX),
    ),
    "fit returns": Row(running, lambda h: h.report(e.TrainerFinished, result={"x": 1}), P.STOPPING, STOP_ALL),
    "a step": Row(running, lambda h: h.report(e.StepCompleted, step=1, version=1), P.RUNNING, []),
    "an evaluation": Row(
        running, lambda h: h.report(e.Evaluated, version=1, accuracy=0.5, count=2), P.RUNNING, []
    ),
    "an evaluation of a set": Row(
        running,
        lambda h: h.report(e.Evaluated, version=1, accuracy=None, count=4, set="aime", prompts=2),
        P.RUNNING,
        [],
    ),
    "paused": Row(running, lambda h: h.decide(e.PauseRequested()), P.PAUSED, ["PauseTrainer"]),
    "resumed without a pause": Row(running, lambda h: h.decide(e.ResumeRequested()), P.RUNNING, []),
    "scaled up": Row(
        running, lambda h: h.decide(e.ScaleRequested("rollout", 3)), P.RECOVERING, ["StartRegion"]
    ),
    "scaled down": Row(
        running,
        lambda h: h.decide(e.ScaleRequested("rollout", 1)),
        P.RUNNING,
        ["UpdateMembership", "StopVertex"],
        None,
        ("rollout-1", V.STOPPING),
    ),
    "advised to have more": Row(running, lambda h: h.decide(advice(2, 3)), P.RECOVERING, ["StartRegion"]),
    "advised to have fewer": Row(
        running,
        lambda h: h.decide(advice(2, 1)),
        P.RUNNING,
        ["UpdateMembership", "StopVertex"],
        None,
        ("rollout-1", V.STOPPING),
    ),
    "an advice that was overtaken": Row(running, lambda h: h.decide(advice(1, 2)), P.RUNNING, []),
    "an advice beyond the cluster": Row(running, lambda h: h.decide(advice(2, 3, possible=2)), P.RUNNING, []),
    "an advice beyond a cluster that shrank": Row(
        running, lambda h: h.decide(advice(2, 3, possible=1)), P.RUNNING, []
    ),
    "an advice for what is not elastic": Row(
        running, lambda h: h.decide(advice(1, 2, role="reward")), P.RUNNING, []
    ),
    "scaled past its limit": Row(running, lambda h: h.decide(e.ScaleRequested("rollout", 9)), P.RUNNING, []),
    "a new master": Row(
        running,
        lambda h: h.decide(e.MasterStarted(2, pid=1, node="n0")),
        P.RUNNING,
        ["UpdateMembership"],
        ("process_died", Scope.VERTEX),
    ),
    "the same master again": Row(
        running, lambda h: h.decide(e.MasterStarted(1, pid=1, node="n0")), P.RUNNING, []
    ),
    "submitted again": Row(
        running, lambda h: h.decide(e.JobSubmitted("j2", "x", {"rollout": 9})), P.RUNNING, []
    ),
    "stopped": Row(
        running, lambda h: h.decide(e.StopRequested("x")), P.STOPPING, ["StopTrainer", "SetTimer"]
    ),
    "killed": Row(running, lambda h: h.decide(e.StopRequested("x", at_once=True)), P.STOPPING, STOP_ALL),
    "killed while stopping": Row(
        stopping, lambda h: h.decide(e.StopRequested("x", at_once=True)), P.STOPPING, STOP_ALL
    ),
    "the replacement comes up": Row(
        recovering, lambda h: h.start("rollout-0"), P.RUNNING, ["UpdateMembership"]
    ),
    "the replacement dies": Row(
        recovering,
        lambda h: h.lose("rollout-0"),
        P.RECOVERING,
        ["UpdateMembership", "StartRegion"],
        ("process_died", Scope.VERTEX),
    ),
    "paused while recovering": Row(
        recovering, lambda h: h.decide(e.PauseRequested()), P.RECOVERING, ["PauseTrainer"]
    ),
    "stopped while recovering": Row(
        recovering, lambda h: h.decide(e.StopRequested("x")), P.STOPPING, ["StopTrainer", "SetTimer"]
    ),
    "resumed": Row(paused, lambda h: h.decide(e.ResumeRequested()), P.RUNNING, ["ResumeTrainer"]),
    "paused twice": Row(paused, lambda h: h.decide(e.PauseRequested()), P.PAUSED, []),
    "the trainer comes back": Row(
        without_trainer, lambda h: h.start("trainer-0"), P.RUNNING, ["StartTrainer"]
    ),
    "stopped without a trainer": Row(
        without_trainer, lambda h: h.decide(e.StopRequested("x")), P.STOPPING, STOP_ALL
    ),
    "the drained one is gone": Row(
        draining, lambda h: h.stop_all(), P.RUNNING, [], None, ("rollout-1", V.STOPPED)
    ),
    "the drained one hangs": Row(
        draining, lambda h: h.lose("rollout-1", "silent"), P.RUNNING, [], None, ("rollout-1", V.STOPPING)
    ),
    "stopping: a rollout hangs": Row(
        stopping,
        lambda h: h.lose("rollout-0", "silent"),
        P.STOPPING,
        ["StopVertex"],
        None,
        ("rollout-0", V.STOPPING),
    ),
    "stopping: the trainer dies": Row(stopping, lambda h: h.lose("trainer-0"), P.STOPPING, STOP_ALL),
    "stopping: the trainer ends": Row(
        stopping, lambda h: h.report(e.TrainerFinished, result={}, stopped=True), P.STOPPING, STOP_ALL
    ),
    "stopping: the deadline": Row(stopping, lambda h: h.decide(e.TimerFired("drain")), P.STOPPING, STOP_ALL),
    "stopping: another timer": Row(stopping, lambda h: h.decide(e.TimerFired("tea")), P.STOPPING, []),
    "stopping: stopped again": Row(stopping, lambda h: h.decide(e.StopRequested("y")), P.STOPPING, []),
    "stopping: paused": Row(stopping, lambda h: h.decide(e.PauseRequested()), P.STOPPING, []),
    "stopping: scaled": Row(stopping, lambda h: h.decide(e.ScaleRequested("rollout", 3)), P.STOPPING, []),
    "running: the deadline of nothing": Row(
        running, lambda h: h.decide(e.TimerFired("drain")), P.RUNNING, []
    ),
    "the cluster is lost": Row(
        recovering,
        lambda h: h.decide(e.ClusterLost("no answer")),
        P.FAILED,
        [],
        None,
        ("rollout-0", V.STOPPED),
    ),
    "stopping: the cluster is lost": Row(stopping, lambda h: h.decide(e.ClusterLost("x")), P.STOPPED, []),
    "ended: the cluster is lost": Row(ended, lambda h: h.decide(e.ClusterLost("x")), P.SUCCEEDED, []),
    "ended: a loss": Row(ended, lambda h: h.lose("rollout-0"), P.SUCCEEDED, []),
    "ended: a stop": Row(ended, lambda h: h.decide(e.StopRequested("x")), P.SUCCEEDED, []),
    "ended: a new master": Row(ended, lambda h: h.decide(e.MasterStarted(2, 1, "n0")), P.SUCCEEDED, []),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_what_follows(history: History, row: Row) -> None:
    row.given(history)
    issued, incidents = len(history.commands), set(history.state.incidents)
    row.when(history)
    assert history.state.job.phase is row.phase
    assert [c.command_kind(command) for command in history.commands[issued:]] == row.commands
    opened = set(history.state.incidents) - incidents
    assert len(opened) == (row.incident is not None)
    if row.incident is not None:
        assert (history.incident.cause, history.incident.scope) == row.incident
    if row.vertex is not None:
        assert history[row.vertex[0]].phase is row.vertex[1]


def test_every_pair_of_the_table_is_reached_and_no_other(history: History) -> None:
    history.decide(e.VertexStartFailed("rollout-0", 1, error="no library"))
    history.start_all()
    history.lose("rollout-0")
    history.start_all()
    history.decide(e.ScaleRequested("rollout", 1))
    history.stop_all()
    history.decide(e.ScaleRequested("rollout", 3))
    history.start("rollout-1")
    history.decide(e.ScaleRequested("rollout", 1))
    history.decide(e.ScaleRequested("rollout", 3))
    history.stop_all()
    history.start_all()
    history.report(e.TrainerFinished, result={})
    history.stop_all()
    assert history.witness.transitions == VERTEX_TRANSITIONS


@pytest.mark.parametrize(
    "pair", [(a, b) for a in VertexPhase for b in VertexPhase if (a, b) not in VERTEX_TRANSITIONS]
)
def test_a_pair_off_the_table_is_refused(history: History, pair: tuple[VertexPhase, VertexPhase]) -> None:
    draft = Draft(history.state)
    draft.set_vertex("rollout-0", phase=pair[0])
    with pytest.raises(
        InvariantBroken, match=r"rollout-0 cannot go from .* \(incarnation 1, reason scaled\)"
    ):
        draft.move("rollout-0", pair[1], 1.0, reason=Reason.SCALED)


# -- evaluations ------------------------------------------------------------------------------------


def test_the_first_result_of_a_set_by_a_version_is_kept(history: History) -> None:
    running(history)
    told = {"version": 2, "count": 4, "prompts": 2, "reward_mean": 0.5}
    for name, accuracy in (("aime", 0.25), ("aime", 0.75), ("math500", None)):
        history.report(e.Evaluated, accuracy=accuracy, set=name, **told)
    found = history.state.evaluations
    assert {key: one.accuracy for key, one in found.items()} == {"aime/2": 0.25, "math500/2": None}


def test_the_snapshot_keeps_the_first_and_the_newest_results_of_a_set(history: History) -> None:
    running(history)
    told = {"count": 4, "prompts": 2, "reward_mean": 0.5}
    last = KEPT_EVALUATIONS + 50
    history.report(e.Evaluated, version=0, accuracy=0.5, set="math500", **told)
    for version in range(1, last + 1):
        history.report(e.Evaluated, version=version, accuracy=0.5, set="aime", **told)
    found = [one.version for one in history.state.evaluations.values() if one.set == "aime"]
    assert sorted(found) == [1, *range(last - KEPT_EVALUATIONS + 1, last + 1)]
    assert "math500/0" in history.state.evaluations
    for version in (1, 2, last - KEPT_EVALUATIONS, last):
        assert is_known_evaluation(history.state.evaluations, "aime", version), (
            "a later trainer reports it again"
        )
    assert not is_known_evaluation(history.state.evaluations, "aime", last + 1)
    assert not is_known_evaluation(history.state.evaluations, "math500", 1)


# -- the order of repairs ---------------------------------------------------------------------------


def test_the_scope_widens_as_budgets_are_spent() -> None:
    spec = spec_with(vertex=Budget(max=1, window_s=1000), job=Budget(max=1, window_s=1000))
    history = History(coordinator_of(spec)).submit().start_all()
    scopes = []
    for _ in range(3):
        history.lose("rollout-0")
        scopes.append(history.incident.scope)
        history.start_all()
    assert scopes == [Scope.VERTEX, Scope.JOB, Scope.GIVE_UP]
    job = history.stop_all().state.job
    assert (job.phase, job.reason) == (JobPhase.FAILED, Reason.BUDGET_SPENT)
    assert job.message == (
        "process_died (rollout-0: process_died again and again, with no step between: this job's script reports none. "
        "Let fit() call report_progress(step=…), or raise failover.silent_attempts)"
    )


def test_a_gradient_that_is_not_finite_ends_the_job_at_once(history: History) -> None:
    """The trainer skips the batches that may be skipped before it reports a failure."""
    history.start_all()
    history.report(e.BatchSkipped, step=1, role="actor", groups=8, tokens=99, error="norm nan")
    assert (history.incident.cause, history.incident.outcome) == ("not_finite", "recovered")
    assert history.state.job.phase is JobPhase.RUNNING
    history.fail_operator("actor-0", code=NOT_FINITE)
    assert history.incident.scope is Scope.GIVE_UP
    job = history.stop_all().state.job
    assert (job.phase, job.reason) == (JobPhase.FAILED, Reason.NOT_FINITE)
    assert job.message == "ValueError: no (actor-0: the gradient is not finite)"


@pytest.mark.parametrize(("vertex", "user_code"), [("actor-0", False), ("reward-0", True)])
def test_memory_that_runs_out_is_a_cause_of_its_own(history: History, vertex: str, user_code: bool) -> None:
    history.start_all().step()
    faults = 0
    while history.state.job.phase is not JobPhase.STOPPING:
        faults += 1
        history.fail_operator(vertex, user_code=user_code, code=OUT_OF_MEMORY, attempt=faults)
        assert history.incident.cause == "out_of_memory"
        history.start_all()
    assert history.stop_all().state.job.reason is Reason.OUT_OF_MEMORY


def test_user_code_is_retried_restarted_and_then_given_up_with_its_traceback(history: History) -> None:
    history.start_all()
    scopes = []
    for _ in range(4):
        history.fail_operator("reward-0", user_code=True)
        scopes.append(history.incident.scope)
        history.start_all()
    assert scopes == [Scope.RETRY, Scope.RETRY, Scope.VERTEX, Scope.GIVE_UP]
    assert (history.state.job.reason, history.state.job.error) == (Reason.USER_CODE, "Traceback …")


def test_a_restart_replaces_what_it_restarts_and_waits_the_second_time(history: History) -> None:
    history.start_all()
    first, second = (
        [x for x in history.lose("actor-0").commands if isinstance(x, c.StartRegion)] for _ in "12"
    )
    assert first == [c.StartRegion("actor-0", {"actor-0": 2, "actor-1": 2}, {"actor-0": 1, "actor-1": 1})]
    assert second[0].replaces == {"actor-0": 2, "actor-1": 2}
    assert second[0].not_before == history.now + 0.5


def test_the_roster_names_exactly_what_runs(history: History) -> None:
    history.start_all()
    [announcement, _] = history.lose("actor-0").commands
    assert isinstance(announcement, c.UpdateMembership)
    assert announcement.running == {"rollout-0": 1, "rollout-1": 1, "reward-0": 1}
    assert announcement.roles == {"trainer": 1, "actor": 2, "rollout": 2, "reward": 1}


def test_a_job_that_waits_for_a_vertex_starts_when_that_is_scaled_away(history: History) -> None:
    for vertex in ("trainer-0", "actor-0", "actor-1", "rollout-0", "reward-0"):
        history.start(vertex)
    decision = history.decide(e.ScaleRequested("rollout", 1))
    assert [c.command_kind(command) for command in decision.commands] == ["StopVertex", "StartTrainer"]
    assert history.state.job.phase is JobPhase.RUNNING


def test_an_incident_of_a_vertex_that_is_scaled_away_is_closed(history: History) -> None:
    history.start_all()
    history.lose("rollout-1")
    history.decide(e.ScaleRequested("rollout", 1))
    assert history.incident.outcome == "scaled away"


def test_incidents_are_kept_by_age_however_the_state_was_loaded(coordinator: FailoverCoordinator) -> None:
    from gyre.failover import differences, fold, rows_of, state_from
    from gyre.failover.incidents import KEPT_INCIDENTS

    history = History(coordinator).submit().start_all()
    for n in range(KEPT_INCIDENTS + 40):
        history.now += 100.0
        history.decide(e.StepReported(n + 1))
        history.lose(("rollout-1", "reward-0", "actor-0")[n % 3])
        history.start_all()
        if n % 50 == 49:
            rows = rows_of(history.state)
            history.state = state_from({key: rows[key] for key in sorted(rows)})
    assert len(history.state.incidents) == KEPT_INCIDENTS + 1, "the newest was open when it was counted"
    assert differences(fold(coordinator, history.records), rows_of(history.state)) == []


def test_incidents_of_one_incarnation_never_share_an_id(history: History) -> None:
    history.start_all()
    ids = set()
    for _ in range(250):
        history.now += 60.0
        history.fail_operator("reward-0")
        ids.add(history.incident.id)
    assert len(ids) == 250


# -- scaling is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "count", "error", "text"),
    [
        ("rollouts", 2, NotFound, "did you mean 'rollout'"),
        ("actor", 3, Conflict, "peers of a collective"),
        ("trainer", 2, Conflict, "one controller"),
        ("rollout", 5, ConfigError, "permitted are 1 to 4"),
        ("rollout", 0, ConfigError, "permitted are 1 to 4"),
    ],
)
def test_scaling_says_what_is_permitted(
    history: History, role: str, count: int, error: type[Exception], text: str
) -> None:
    history.start_all()
    with pytest.raises(error, match=text):
        history.coordinator.check_scale(history.state, role, count)


def test_a_job_on_its_way_out_is_not_scaled(history: History) -> None:
    stopping(history)
    with pytest.raises(Conflict, match="is stopping"):
        history.coordinator.check_scale(history.state, "rollout", 3)


def test_who_came_or_went_by_the_policy_says_why(history: History) -> None:
    running(history)
    history.decide(advice(2, 4))
    history.start_all()
    told = {vertex.id: vertex.message for vertex in history.state.vertices.values() if vertex.message}
    assert told == {"rollout-2": "Samples wait.", "rollout-3": "Samples wait."}
    history.decide(advice(4, 3))
    history.stop_all()
    assert history.state.vertices["rollout-3"].message == "Samples wait."
    assert history.state.job.roles["rollout"] == 3


@pytest.mark.parametrize("why", ["no room", "no library"])
def test_an_instance_that_only_the_policy_wanted_and_that_cannot_be_had_does_not_end_the_job(
    why: str,
) -> None:
    history = History(coordinator_of(spec_with(vertex=Budget(max=2, window_s=1e9)))).submit()
    history.start_all()
    history.decide(advice(2, 3))
    if why == "no room":
        history.decide(e.VertexWaitsForRoom("rollout-2", 1, "a GPU", "none"))
    else:
        for incarnation in range(1, 4):
            history.decide(e.VertexStartFailed("rollout-2", incarnation, error="no library"))
    assert history.state.job.roles["rollout"] == 2
    assert history.state.vertices["rollout-2"].phase is VertexPhase.STOPPING
    last = list(history.state.incidents.values())[-1]
    assert (last.scope, last.outcome) == (Scope.GIVE_UP, "scaled away")
    assert last.decision == "go on with 2 of rollout: rollout-2 cannot be had"
    history.stop_all()
    assert history.state.job.phase is JobPhase.RUNNING
