"""What the state keeps of a job's steps, and its warnings that it does not learn."""

from __future__ import annotations

from gyre.failover import events as e
from gyre.failover.state import JobPhase, rows_of, state_from
from tests.failover.histories import History, coordinator_of, spec_with


def running() -> History:
    return History(coordinator_of(spec_with())).submit().start_all()


def reported(history: History, kind: type[e.Event], **fields: object) -> None:
    trainer = history.state.vertices["trainer-0"]
    history.decide(kind(incarnation=trainer.incarnation, report=trainer.reported + 1, **fields))


def step(history: History, number: int, **metrics: float) -> None:
    reported(history, e.StepCompleted, step=number, version=number, metrics=metrics)


def test_the_first_and_the_last_step_are_kept_and_all_tokens() -> None:
    history = running()
    for number in (1, 2, 3):
        step(history, number, reward_mean=number / 10, tokens=100)
    step(history, 3, reward_mean=0.9, tokens=100)  # reported again
    training = history.state.training
    assert (training.first, training.last, training.tokens) == (
        {"step": 1, "version": 1, "reward_mean": 0.1, "tokens": 100},
        {"step": 3, "version": 3, "reward_mean": 0.3, "tokens": 100},
        300,
    )
    assert state_from(rows_of(history.state)).training == training


def test_a_job_that_goes_on_has_a_run_of_its_own() -> None:
    history = running()
    step(history, 1, reward_mean=0.1)
    reported(history, e.TrainerFinished, result={})
    for vertex in list(history.state.vertices.values()):
        history.decide(e.VertexStopped(vertex.id, vertex.incarnation))
    assert history.state.job.phase is JobPhase.SUCCEEDED
    history.decide(e.JobContinued(history.state.job.roles))
    continued_at = history.now
    history.decide(e.MasterStarted(2, pid=11, node="n0"))
    history.start_all()
    step(history, 2, reward_mean=0.5)
    step(history, 3, reward_mean=0.6)
    training = history.state.training
    assert (training.continued_at, training.continued_step, training.continued_reward) == (
        continued_at,
        1,
        0.5,
    )
    assert training.first["reward_mean"] == 0.1


def test_a_warning_is_kept_until_it_holds_no_longer_and_comes_once() -> None:
    history = running()
    warned = {"code": "cut_off", "message": "too short", "step": 3}
    reported(history, e.LearningWarned, **warned)
    before = history.state
    reported(history, e.LearningWarned, **(warned | {"step": 9}))
    assert history.state is before, "a later trainer reported it again"
    reported(history, e.LearningWarned, **(warned | {"step": 9, "message": "still too short"}))
    [kept] = history.state.warnings.values()
    assert (kept.step, kept.message) == (3, "still too short")
    before = history.state
    reported(history, e.LearningWarned, **warned, again=True)
    assert history.state is before, "what a later trainer repeats is not news, and its words are older"
    reported(history, e.LearningWarned, **(warned | {"code": "other"}), holds=False)
    assert history.state is before, "it was never reported"
    assert state_from(rows_of(history.state)).warnings == history.state.warnings
    reported(history, e.LearningWarned, **warned, holds=False)
    assert [one.holds for one in history.state.warnings.values()] == [False]
    reported(history, e.LearningWarned, **(warned | {"step": 12}))
    assert [(one.step, one.holds) for one in history.state.warnings.values()] == [(12, True)]
