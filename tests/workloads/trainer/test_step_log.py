"""What people see of steps, whatever dies: a line in the log, one in metrics.jsonl, warnings once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.testing.in_process import InProcessJob
from gyre.workloads.trainer.learning.learning_watch import LearningWatch
from gyre.workloads.trainer.learning.step_log import MetricsFile, StepLog
from gyre.workloads.trainer.training_run import compares_in_group
from gyre.workloads.trainer.wait_stats import WaitStats
from tests.workloads.conftest import steps_of
from tests.workloads.reported import Reported

DEADLINE_S = 90


def file_of(job: InProcessJob) -> list[dict]:
    return [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]


def test_every_number_is_the_same_everywhere(make_job, capfd: pytest.CaptureFixture[str]) -> None:
    with make_job() as job:
        job.result(timeout_s=DEADLINE_S)
    ledger = [row.metrics for row in steps_of(job)]
    assert file_of(job) == ledger
    assert [report.body["metrics"] for report in job.reports_of("StepCompleted")] == ledger
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/5" for step in range(1, 6)]
    assert all("  reward " in line and "  answer " in line for line in lines)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_trainer_that_dies_at_a_step_leaves_one_line_a_step_and_one_warning(make_job, nth: int) -> None:
    job = make_job(run={"evaluate_every": 0})
    job.on_report("StepCompleted", nth, lambda: job.kill("trainer-0"), when="before")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert file_of(job) == [row.metrics for row in steps_of(job)]
    assert [row["step"] for row in file_of(job)] == [1, 2, 3, 4, 5]
    warned = [(report.body["code"], report.body["message"]) for report in job.reports_of("LearningWarned")]
    assert sorted(warned) == sorted(set(warned)), "other words at the end alone"
    assert [code for code, _ in warned].count("not_evaluated") == 1


def test_a_warning_of_an_earlier_trainer_is_reported_again_and_not_said_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {step: {"step": step, "cut_off_ratio": 0.5} for step in (1, 2, 3)}
    reported = Reported()
    log = StepLog(
        MetricsFile(tmp_path, steps),
        LearningWatch(),
        earlier=steps,
        steps_planned=9,
        waits=WaitStats("actor"),
        reports=reported,
    )
    assert [(one["code"], one["again"]) for one in reported.events if one["holds"]] == [("cut_off", True)]
    assert capsys.readouterr().out == ""
    log.ended()
    assert capsys.readouterr().out == "", "the words are the same"


@pytest.mark.parametrize(
    ("n", "estimator", "compared"), [(1, "rloo", False), (2, "rloo", True), (8, "gae", False)]
)
def test_flat_groups_are_warned_of_where_samples_are_compared(n: int, estimator: str, compared: bool) -> None:
    config = {"sampling": {"n": n}, "loss": {"adv_estimator": estimator}}
    assert compares_in_group(config) is compared
