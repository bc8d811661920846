"""Jobs that make no step though every vertex runs: when that is noticed, and what is done about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.config import JobSpec
from gyre.failover import JobPhase, JobRecord, JobState, Observation, Scope, Stall, StepWatch
from gyre.failover import commands as c
from gyre.failover import events as e
from tests.doubles.standing_job import small_spec
from tests.failover.histories import History

FLOOR_S = 100.0


class Watched:
    """A job under a watch, a second at a time."""

    def __init__(self, **changes: Any) -> None:
        spec: JobSpec = small_spec()
        spec.recipe = "grpo"
        spec.run.steps = 50
        spec.failover.step_timeout_s = FLOOR_S
        for name, value in changes.items():
            setattr(spec, name, value)
        self.watch = StepWatch(spec)
        self.now = 5000.0
        self.job = JobRecord(phase=JobPhase.RUNNING, roles={"trainer": 1, "rollout": 2})
        self.fields: dict[str, dict[str, Any]] = {"rollout-0": {"tokens": 0, "load": 0.1}}
        self.seen: dict[str, Observation] = {}

    def run(self, seconds: int, *, step_every: int = 0, tokens: bool = False, busy: str = "") -> list[Stall]:
        """What was told meanwhile. Fractions change all the time, as shares do."""
        told = []
        for second in range(1, seconds + 1):
            self.now += 1.0
            self.fields["rollout-0"]["load"] += 0.1
            if tokens:
                self.fields["rollout-0"]["tokens"] += 5
            if busy:
                role = busy.rpartition("-")[0]
                self.seen[busy] = Observation(busy, role, 1, self.now, "run", second, self.now)
            if step_every and second % step_every == 0:
                self.job = replace(self.job, step=self.job.step + 1)
            stall = self.watch.look(JobState(job=self.job), self.seen, self.fields, self.now)
            if stall is not None:
                told.append(stall)
        return told


@pytest.fixture
def stepping() -> Watched:
    watched = Watched()
    assert watched.run(30, step_every=3, tokens=True) == []
    return watched


def test_no_step_for_longer_than_the_floor_is_a_stall_told_once_a_limit(stepping: Watched) -> None:
    assert stepping.run(100) == []
    [stall] = stepping.run(99)
    assert stall == Stall(step=10, after_s=101.0, limit_s=FLOOR_S, stands_still=True)
    assert len(stepping.run(100)) == 1


def test_the_limit_grows_with_the_job_s_own_steps() -> None:
    watched = Watched()
    assert watched.run(180, step_every=60, tokens=True) == []
    assert watched.watch.limit_s == 600.0
    assert watched.run(600) == []
    assert len(watched.run(2)) == 1


@pytest.mark.parametrize("busy", [{"tokens": True}, {"busy": "actor-0"}])
def test_a_stall_amid_work_is_told_as_such(stepping: Watched, busy: dict[str, Any]) -> None:
    [stall] = stepping.run(110, **busy)
    assert not stall.stands_still


def test_the_trainer_s_own_call_is_no_work(stepping: Watched) -> None:
    [stall] = stepping.run(110, busy="trainer-0")
    assert stall.stands_still


@pytest.mark.parametrize("busy", [{"tokens": True}, {"busy": "actor-0"}])
def test_a_first_step_may_take_as_long_as_it_works(busy: dict[str, Any]) -> None:
    watched = Watched()
    assert watched.run(2000, **busy) == []
    [stall] = watched.run(101)
    assert stall.stands_still


def test_what_follows_the_last_step_is_judged_as_a_first_step_is(stepping: Watched) -> None:
    stepping.job = replace(stepping.job, step=50)
    assert stepping.run(500, tokens=True) == []
    assert len(stepping.run(101)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": JobPhase.STARTING},
        {"phase": JobPhase.PAUSED},
        {"phase": JobPhase.RECOVERING},
        {"phase": JobPhase.STOPPING},
        {"roles": {"trainer": 1, "rollout": 0}},
    ],
    ids=lambda changes: str(next(iter(changes.values()))),
)
def test_only_what_runs_can_stall(stepping: Watched, changes: dict[str, Any]) -> None:
    runs = stepping.job
    stepping.run(90)
    stepping.job = replace(runs, **changes)
    assert stepping.run(1000) == []
    stepping.job = runs
    assert stepping.run(100) == [], "the count did not begin anew"
    assert len(stepping.run(2)) == 1


def test_a_script_never_stands_still() -> None:
    watched = Watched(recipe=None)
    watched.run(30, step_every=3)
    [stall] = watched.run(110)
    assert not stall.stands_still


# -- what is done -----------------------------------------------------------------------------------


def stalled(history: History, *, step: int | None = None, stands_still: bool = True) -> list[c.StartRegion]:
    at = history.state.job.step if step is None else step
    evidence = {"waits": {"actor waits for rollout": 1.0}, "stack": "fit"}
    decision = history.decide(e.JobStalled(at, 101.0, 100.0, stands_still, evidence))
    return [command for command in decision.commands if isinstance(command, c.StartRegion)]


def test_first_the_trainer_then_all_then_the_end(history: History) -> None:
    history.start_all()
    history.report(e.StepCompleted, step=3, version=3)
    assert [region.vertices for region in stalled(history)] == [{"trainer-0": 2}]
    incident = history.incident
    assert (incident.cause, incident.scope, incident.region) == ("no_step", Scope.VERTEX, ("trainer-0",))
    assert incident.evidence["error"] == "no step after step 3 for 101 s (limit 100 s)"
    assert incident.evidence["waits"] == {"actor waits for rollout": 1.0}
    history.start_all()
    assert {vertex for region in stalled(history) for vertex in region.vertices} == set(
        history.state.vertices
    )
    history.start_all()
    assert stalled(history) == []
    assert history.incident.scope is Scope.GIVE_UP
    history.stop_all()
    assert history.state.job.phase is JobPhase.FAILED
    assert history.state.job.message == (
        "no step after step 3 for 101 s (limit 100 s) "
        "(trainer-0: no_step again and again, with no step between)"
    )


def test_a_step_pays_for_the_next_stall(history: History) -> None:
    history.start_all()
    for step in (1, 2, 3):
        assert [region.vertices.keys() for region in stalled(history)] == [{"trainer-0"}]
        history.start_all()
        history.report(e.StepCompleted, step=step, version=step)
    assert {incident.outcome for incident in history.state.incidents.values()} == {"recovered"}


def test_what_is_at_work_is_left_alone(history: History) -> None:
    history.start_all()
    before = history.state.vertices
    assert stalled(history, stands_still=False) == []
    assert history.state.vertices == before
    assert (history.incident.scope, history.incident.outcome) == (Scope.RETRY, "left alone")


def test_a_stall_that_is_over_when_it_is_heard_of_changes_nothing(history: History) -> None:
    history.start_all()
    history.report(e.StepCompleted, step=1, version=1)
    before = history.state
    stalled(history, step=0)
    assert history.state == before
    history.lose("rollout-0")
    before = history.state
    stalled(history)
    assert history.state == before
