"""Engines that do not start: one incident for each vertex, an end after three attempts in a row, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import Budget, JobSpec
from gyre.failover import Incident, JobPhase, Reason, VertexPhase, differences, fold, rows_of, state_from
from gyre.failover import events as e
from gyre.graph import compile_job
from gyre.graph.recipes import ROLLOUT_INSTANCE
from tests.doubles.standing_job import small_spec
from tests.failover.histories import History, coordinator_of

SAID = "ModuleNotFoundError: No module named 'flashinfer'"
WORDS = f'Traceback (most recent call last):\n  File "launch.py", line 3\n{SAID}'
MANAGER = "rollout_manager-0"


def spec_of(rollouts: int, **failover: Any) -> JobSpec:
    spec = small_spec()
    spec.roles["rollout"] = spec.roles["rollout"].model_copy(
        update={"entrypoint": ROLLOUT_INSTANCE, "total": rollouts}
    )
    spec.roles["rollout_manager"] = spec.roles["reward"].model_copy()
    for name, value in failover.items():
        setattr(spec.failover, name, value)
    return compile_job(spec).spec


def running(rollouts: int = 1, **failover: Any) -> History:
    return History(coordinator_of(spec_of(rollouts, **failover))).submit().start_all()


def told(history: History, what: str, after_s: float = 1.0, **details: Any) -> None:
    manager = history[MANAGER]
    event = e.RolloutsChanged(MANAGER, manager.incarnation, what, details, report=manager.reported + 1)
    history.decide(event, after_s=after_s)


def fails(
    history: History, vertex: str = "rollout-0", *, others: list[str] | None = None, **other: Any
) -> None:
    told(
        history,
        "EngineStartFailed",
        instance=vertex,
        error="exit status 1.",
        said=SAID,
        words=WORDS,
        others=others or [],
        **other,
    )


def starts(history: History, vertex: str = "rollout-0") -> None:
    told(history, "EngineStarted", instance=vertex)


def incidents(history: History) -> list[Incident]:
    return [one for one in history.state.incidents.values() if one.cause == "engine_start_failed"]


def test_a_version_that_nobody_serves_is_one_incident_until_one_is_served() -> None:
    history = running()
    told(history, "PolicyNotServed", version=3, refused={"rollout-0": "norm.weight holds NaN"})
    told(history, "PolicyNotServed", version=4, refused={"rollout-0": "another model"})

    def found() -> list[tuple[str, str]]:
        all_of_them = sorted(history.state.incidents.values(), key=lambda one: one.at)
        return [
            (one.outcome, one.evidence["error"]) for one in all_of_them if one.cause == "policy_not_served"
        ]

    first, second = found()
    assert first == ("recovered", "No instance could load version 3. rollout-0: norm.weight holds NaN")
    assert second == ("open", "No instance could load version 4. rollout-0: another model")
    told(history, "PolicyServed", version=5)
    assert [outcome for outcome, _ in found()] == ["recovered", "recovered"]
    told(history, "PolicyServed", version=6)
    assert len(found()) == 2


def test_the_job_ends_after_three_attempts_and_its_error_begins_with_the_last_words() -> None:
    history = running()
    for attempt in (1, 2):
        fails(history)
        (incident,) = incidents(history)
        assert (incident.outcome, incident.evidence["attempts"]) == ("open", attempt)
        assert f"{attempt} of 3" in incident.decision
        assert history.state.job.phase is JobPhase.RUNNING
        assert history["rollout-0"].restarts == 0
    fails(history)
    history.stop_all()
    job = history.state.job
    assert (job.phase, job.reason) == (JobPhase.FAILED, Reason.ENGINE_NOT_STARTED)
    assert job.error.startswith(WORDS)
    assert "3 starts in a row" in job.error
    assert "To do: install" in job.error
    assert job.message.startswith(SAID)
    (incident,) = incidents(history)
    assert (incident.outcome, incident.evidence["attempts"]) == ("gave up", 3)
    assert incident.evidence["error"] == SAID


def test_a_start_that_succeeds_resets_the_count_and_closes_the_incident() -> None:
    history = running()
    fails(history)
    fails(history)
    starts(history)
    (incident,) = incidents(history)
    assert incident.outcome == "recovered"
    fails(history)
    fails(history)
    assert history.state.job.phase is JobPhase.RUNNING
    assert [one.outcome for one in incidents(history)] == ["recovered", "open"]


def test_attempts_are_counted_over_masters_managers_and_agents() -> None:
    """The successor has the rows; the fold has the same."""
    history = running()
    fails(history)
    history.lose("rollout-0", "unhealthy")
    history.start("rollout-0")
    assert incidents(history)[0].outcome == "open"  # the agent's start is not the engine's
    fails(history)
    history.state = state_from(rows_of(history.state))
    history.decide(e.MasterStarted(2, pid=11, node="n0"))
    history.lose(MANAGER)
    history.start(MANAGER)
    fails(history)
    assert history.state.job.outcome is JobPhase.FAILED
    assert not differences(fold(coordinator_of(spec_of(1)), history.records), rows_of(history.state))


def test_attempts_long_ago_are_not_in_a_row() -> None:
    history = running(engine_start=Budget(max=3, window_s=100))
    for _ in range(5):
        fails(history, after_s=60.0)
    assert history.state.job.phase is JobPhase.RUNNING


def test_the_job_goes_on_with_those_that_can_do_the_work_and_ends_with_the_last() -> None:
    history = running(2)
    starts(history, "rollout-1")
    for _ in range(4):
        fails(history)
    (incident,) = incidents(history)
    assert (incident.outcome, incident.evidence["attempts"]) == ("open", 4)
    assert "go on with rollout-1" in incident.decision
    assert history.state.job.phase is JobPhase.RUNNING
    fails(history, "rollout-1")
    fails(history, "rollout-1")
    assert history.state.job.phase is JobPhase.RUNNING
    fails(history, "rollout-1")
    assert history.state.job.outcome is JobPhase.FAILED


def test_an_instance_that_dialled_in_can_do_the_work() -> None:
    history = running()
    for _ in range(4):
        fails(history, others=["spot-7"])
    assert "go on with spot-7" in incidents(history)[0].decision
    assert history.state.job.phase is JobPhase.RUNNING
    fails(history, others=[])
    assert history.state.job.outcome is JobPhase.FAILED


def test_an_instance_that_only_the_policy_asked_for_is_scaled_away() -> None:
    history = running()
    history.decide(e.ScaleAdvised(MANAGER, 1, "rollout", 1, 2, "Samples wait.", report=1))
    history.start("rollout-1")
    for _ in range(3):
        fails(history, "rollout-1")
    assert history.state.job.roles["rollout"] == 1
    assert history["rollout-1"].phase is VertexPhase.STOPPING
    assert {one.outcome for one in incidents(history)} == {"scaled away"}


@pytest.mark.parametrize("instance", ["spot-7", "actor-0", 3, None])
def test_of_an_instance_that_nobody_placed_the_journal_only_keeps_it(instance: Any) -> None:
    history = running()
    for _ in range(4):
        told(history, "EngineStartFailed", instance=instance, error="x")
    assert not history.state.incidents
    assert history.state.job.phase is JobPhase.RUNNING


def deaths(history: History) -> list[Incident]:
    return [one for one in history.state.incidents.values() if one.cause == "engine_died"]


def died(history: History, words: str, *, others: list[str] | None = None) -> None:
    details = {} if others is None else {"others": others}
    told(history, "EngineDied", instance="rollout-1", error="killed", tail="…", words=words, **details)


def test_each_death_of_an_engine_is_an_incident_with_its_last_words_until_one_has_started() -> None:
    history = running(2)
    died(history, "a\nlast line", others=["rollout-0"])
    died(history, "another", others=[])
    starts(history, "rollout-0")
    first, second = deaths(history)
    assert (first.vertex, first.outcome, second.outcome) == ("rollout-1", "open", "open")
    assert first.evidence == {"error": "killed", "last_words": "a\nlast line"}
    assert second.evidence["last_words"] == "another"
    assert first.decision == "start another engine; its samples go on elsewhere"
    assert second.decision == "start another engine; its samples wait for it"
    starts(history, "rollout-1")
    recovered = [one.recovered_at - one.at for one in deaths(history) if one.recovered_at is not None]
    assert recovered == [3.0, 2.0]
    assert history["rollout-1"].restarts == 0
    assert not differences(fold(coordinator_of(spec_of(2)), history.records), rows_of(history.state))


def test_a_vertex_that_starts_ends_no_death_of_an_engine() -> None:
    """Its own runs all the time."""
    history = running(2)
    died(history, "last line", others=["rollout-0"])
    history.lose("reward-0")
    history.start("reward-0")
    assert [one.outcome for one in deaths(history)] == ["open"]


def test_a_death_in_a_journal_of_an_earlier_release_is_still_over_at_once() -> None:
    history = running(2)
    died(history, "last line")
    (death,) = deaths(history)
    assert (death.outcome, death.recovered_at) == ("recovered", death.at)


def test_a_death_is_no_longer_open_when_its_instance_is_scaled_away() -> None:
    history = running()
    history.decide(e.ScaleAdvised(MANAGER, 1, "rollout", 1, 2, "Samples wait.", report=1))
    history.start("rollout-1")
    died(history, "last line", others=["rollout-0"])
    for _ in range(3):
        fails(history, "rollout-1")
    history.stop_all()
    assert [one.outcome for one in deaths(history)] == ["scaled away"]


def test_a_death_in_a_journal_of_an_earlier_release_is_still_no_incident() -> None:
    history = running()
    told(history, "EngineDied", instance="rollout-0", error="killed by SIGKILL", tail="last line")
    told(history, "EngineDied", instance="joined-7", error="killed by SIGKILL", tail="", words="not ours")
    assert history.state.incidents == {}
