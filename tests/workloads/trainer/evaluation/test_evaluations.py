"""The held-out accuracy has no hole: each version that is due an evaluation has a result, or a reason why not."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from gyre.testing.in_process import InProcessJob
from gyre.workloads.trainer.evaluation.log import EvaluationLog
from tests.workloads.trainer.test_loop import DEADLINE_S
from tests.workloads.trainer.test_plane_trainer import MakePlaned, came_out_right, planed

__all__ = ["planed"]  # a fixture

HELD_OUT = {-1, -2, -3}


def rows_of(job: InProcessJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.directory / "evaluations.jsonl").read_text().splitlines()]


def versions_of(job: InProcessJob, kind: str) -> list[int]:
    return [report.body["version"] for report in job.reports_of(kind)]


# -- the file ---------------------------------------------------------------------------------------


def test_a_version_has_one_line_whatever_comes_again(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    first = EvaluationLog(path)
    assert first.add({"version": 0, "accuracy": 0.25, "count": 4})
    assert first.leave_out(2, "gone")
    again = EvaluationLog(path)
    again.load()
    for known in (first, again):
        assert not known.add({"version": 0, "accuracy": 0.5, "count": 4})
        assert not known.add({"version": 2, "accuracy": 0.5, "count": 4})
        assert not known.leave_out(0, "late")
        assert not known.leave_out(2, "again")
        assert [row["accuracy"] for row in known.rows] == [0.25]
        assert known.left_out == {2: "gone"}
        assert [known.is_settled(version) for version in (0, 1, 2)] == [True, False, True]
    assert len(path.read_text().splitlines()) == 2


def test_a_line_cut_short_goes_and_the_others_stay(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    whole = '{"version": 0, "accuracy": 0.25, "count": 4}\n{"version": 2, "left_out": "gone"}\n'
    path.write_text(whole + '{"version": 4, "accu')
    found = EvaluationLog(path)
    found.load()
    assert path.read_text() == whole
    assert (len(found.rows), found.left_out) == (1, {2: "gone"})


# -- a trainer that dies while one is open ----------------------------------------------------------


def test_the_rollout_plane_answers_an_evaluation_of_a_version_that_training_has_left_behind(
    planed: MakePlaned,
) -> None:
    """Whether the answer comes before the next trainer, to which it is delivered unasked, or after."""
    accuracies = []
    for answered in ("undisturbed", "before", "after"):
        job, plane = planed()
        if answered != "undisturbed":
            job.on_report("Evaluated", 1, lambda plane=plane: plane.held.update(HELD_OUT))

        def die(job: InProcessJob = job, plane: Any = plane, answered: str = answered) -> None:
            if answered == "before":
                plane.release()
                plane.wait_for({("evaluate/2", one) for one in HELD_OUT})
                job.kill(
                    "actor-0", no_room=True
                )  # so that the answer is there before the next trainer can ask for it
                threading.Timer(0.2, lambda: job.make_room("actor-0")).start()
            if answered != "undisturbed":
                job.kill_trainer()
            plane.release()

        job.on_report("StepCompleted", 3, die)
        with job:
            came_out_right(job, plane)
        assert sorted(versions_of(job, "Evaluated")) == [0, 2, 4], answered
        assert versions_of(job, "EvaluationLeftOut") == []
        accuracies.append(sorted((row["version"], row["accuracy"]) for row in rows_of(job)))
    assert accuracies[0] == accuracies[1] == accuracies[2]


def test_an_evaluation_that_a_newer_version_has_overtaken_is_left_out_with_the_reason(
    planed: MakePlaned,
) -> None:
    """The dead trainer's request never came to the rollout plane."""
    job, plane = planed()
    job.on_report("Evaluated", 1, lambda: plane.held.update(HELD_OUT))

    def die() -> None:
        plane.take("evaluate/2", sorted(HELD_OUT))
        plane.release()
        job.kill_trainer()

    job.on_report("StepCompleted", 3, die)
    with job:
        came_out_right(job, plane)
    assert versions_of(job, "Evaluated") == [0, 4]
    (told,) = job.reports_of("EvaluationLeftOut")
    assert told.body["version"] == 2
    assert "a newer one is served" in told.body["reason"]
    assert {"version": 2, "left_out": told.body["reason"]} in rows_of(job)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [("ForgetfulReward", "returned None, expected the list"), ("BlindReward", "no reward (None)")],
)
def test_a_reward_that_does_not_score_an_evaluation_is_told_so(
    planed: MakePlaned, reward: str, problem: str
) -> None:
    """The evaluation of version 0 is scored before anything that is trained on."""
    roles = {"reward": {"entrypoint": f"tests.workloads.toy_policy:{reward}"}}
    job, plane = planed(roles=roles)
    plane.held.update(range(8))
    with job:
        told = job.wait_for_report("OperatorFailed", timeout_s=DEADLINE_S)
        assert job.reports_of("TrainerFailed") == []
    assert (told.body["vertex"], told.body["operator"]) == ("reward-0", "reward.score")
    assert problem in told.body["error"]
    assert told.body["user_code"] is True


def test_a_rollout_class_evaluates_the_newest_version_instead(make_job) -> None:
    """Weights come with the call, and older ones are gone with the trainer that had them."""
    job = make_job(run={"groups_per_firing": 8})
    gate = threading.Event()
    job.on("rollout.evaluate", 2, lambda: gate.wait(DEADLINE_S))
    job.on_report("StepCompleted", 3, lambda: (job.kill_trainer(), gate.set()))
    with job:
        job.result(timeout_s=DEADLINE_S)
        assert job.progress["accuracy_version"] == 4
    assert versions_of(job, "Evaluated") == [0, 3, 4]
    (told,) = job.reports_of("EvaluationLeftOut")
    assert told.body["version"] == 2
    assert told.body["reason"] == "version 3 was served by then, and was evaluated instead"


def test_of_several_that_are_open_only_the_last_is_made(make_job) -> None:
    roles = {"rollout": {"entrypoint": "tests.workloads.toy_policy:ToyRollout", "total": 3}}
    job = make_job(run={"groups_per_firing": 8, "evaluate_every": 1}, roles=roles, device_per_node=16)
    gate = threading.Event()
    for nth in (2, 3):
        job.on("rollout.evaluate", nth, lambda: gate.wait(DEADLINE_S))
    job.on_report("StepCompleted", 3, lambda: (job.kill_trainer(), gate.set()))
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert versions_of(job, "Evaluated") == [0, 3, 4, 5]
    assert versions_of(job, "EvaluationLeftOut") == [1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_evaluation_that_was_told_is_not_made_again(make_job, when) -> None:
    job = make_job()
    calls: list[int] = []
    for nth in range(1, 9):
        job.on("rollout.evaluate", nth, lambda nth=nth: calls.append(nth))
    job.on_report("Evaluated", 2, job.kill_trainer, when=when)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert [row["version"] for row in rows_of(job)] == [0, 2, 4]
    assert len(calls) == 3
