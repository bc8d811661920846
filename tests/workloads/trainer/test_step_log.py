"""What people see of steps, whatever dies: a line in the log, one in metrics.jsonl, warnings once."""

from __future__ import annotations

import json

import pytest

from gyre.testing.in_process import InProcessJob
from tests.workloads.conftest import steps_of

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
