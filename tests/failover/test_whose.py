"""Whose fault it was: a wrong configuration ends the job at once, and a user's line is in the last sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gyre.failover import JobPhase, Reason
from gyre.failover import events as e
from gyre.failover.state import Scope
from tests.failover.histories import History

SENTENCE = "config.data: the folder holds no held-out prompts."


def starts(history: History) -> None:
    failed = e.VertexStartFailed("actor-0", 1, error=SENTENCE, code="config")
    history.decide(failed)


def trains(history: History) -> None:
    history.start_all()
    history.report(e.TrainerFailed, error=SENTENCE, traceback="", user_code=False, code="graph")


def calls(history: History) -> None:
    history.start_all()
    history.fail_operator("reward-0", error=SENTENCE, code="config.model_folder", attempt=1)


@pytest.mark.parametrize("fails", [starts, trains, calls])
def test_a_wrong_configuration_is_tried_once_and_is_nobodys_code(
    history: History, fails: Callable[[History], None]
) -> None:
    fails(history)
    incident = history.incident
    assert (incident.scope, incident.cause, incident.user_code) == (Scope.GIVE_UP, "config_error", False)
    assert len(history.state.incidents) == 1
    assert not history.state.uses
    job = history.stop_all().state.job
    assert (job.phase, job.reason) == (JobPhase.FAILED, Reason.CONFIG)
    assert job.message.startswith(SENTENCE)
    assert job.message.endswith("the configuration is wrong, so it is not tried again)")


def test_a_role_that_has_started_is_not_configured_wrong_where_one_machine_lacks_something(
    history: History,
) -> None:
    history.start_all()
    history.lose("rollout-0")
    restarted = history.state.vertices["rollout-0"].incarnation
    history.decide(e.VertexStartFailed("rollout-0", restarted, error=SENTENCE, code="config"))
    assert history.incident.scope is not Scope.GIVE_UP
    assert history.state.job.phase is not JobPhase.STOPPING


def test_the_last_sentence_has_the_users_line_the_exception_and_the_method(history: History) -> None:
    history.start_all()
    attempts = 0
    while history.state.job.phase is not JobPhase.STOPPING:
        attempts += 1
        history.fail_operator(
            "reward-0",
            user_code=True,
            attempt=attempts,
            error="ValueError: no boxed answer",
            place="reward.py:12",
            method="my_rewards:Score.score",
        )
        history.start_all()
    job = history.stop_all().state.job
    assert job.message == (
        "reward.py:12: ValueError: no boxed answer "
        f"(my_rewards:Score.score on reward-0: user code raised, {attempts} attempts)"
    )


def test_a_sentence_that_names_its_place_does_not_name_it_twice(history: History) -> None:
    error = "my_rewards:Score.score (reward.py:9) returned a reward that is nan."
    history.start_all()
    while history.state.job.phase is not JobPhase.STOPPING:
        history.report(
            e.TrainerFailed,
            error=error,
            traceback="",
            user_code=True,
            place="reward.py:9",
            method="my_rewards:Score.score",
        )
        history.start_all()
    assert history.stop_all().state.job.message == f"{error} (trainer-0: user code raised)"
