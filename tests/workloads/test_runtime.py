"""A trainer with a `fit()` of its own: its handles, its result, its failures, pause and stop."""

from __future__ import annotations

import threading
import time

import pytest

from gyre.errors import JobFailed, StoreError, UserCodeError
from gyre.rollouts.trainer import sample_ledger
from tests.workloads.scripts import Thinker, script_spec
from tests.workloads.trainer.test_loop import ONE_RESTART

DEADLINE_S = 60


def result_of(make_job, trainer):
    with make_job(script_spec(trainer)) as job:
        return job.result(timeout_s=DEADLINE_S)


def test_the_value_of_fit_is_the_jobs_result(make_job):
    assert result_of(make_job, "Sum") == {"sum": 21, "role": "trainer"}


def test_a_plain_class_gets_its_handles_as_attributes(make_job):
    assert result_of(make_job, "PlainSum") == {"value": 21}


def test_what_a_journal_cannot_hold_is_told_as_text(make_job):
    assert result_of(make_job, "Odd") == {"1": "nan", "set": "{2}", "list": [1, [2.5, None, True]]}


@pytest.mark.parametrize(
    ("trainer", "error"),
    [
        ("Mistaken", r"Mistaken has no attribute 'wroker'; role handles: worker"),
        ("Raising", r"KeyError: 'loss'"),
        ("Nothing", r"Nothing must define fit\(\)"),
        ("Quitter", r"SystemExit: 3"),
        ("Careless", r"worker-0\.fail raised ValueError: bad luck"),
    ],
)
def test_a_fit_that_raises_fails_the_job_by_the_users_own_words(make_job, trainer, error):
    with pytest.raises(UserCodeError, match=error) as caught:
        result_of(make_job, trainer)
    assert "Traceback" in caught.value.traceback


def test_the_traceback_of_a_vertexs_exception_is_the_vertexs(make_job):
    with pytest.raises(UserCodeError) as caught:
        result_of(make_job, "Careless")
    assert 'raise ValueError(self.config["text"])' in caught.value.traceback


def test_a_dead_vertex_is_replaced_under_a_running_fit(make_job):
    job = make_job(script_spec("Sum"))
    job.on("worker.work", 1, lambda: job.kill("worker-1"), vertex="worker-1")
    with job:
        assert job.result(timeout_s=DEADLINE_S)["sum"] == 21
    assert [job.vertex(name).host.incarnation for name in ("worker-0", "worker-1")] == [1, 2]


def test_a_killed_trainer_begins_its_fit_again(make_job):
    job = make_job(script_spec("Sum"))
    job.on_report("StepCompleted", 1, job.kill_trainer, when="before")
    with job:
        assert job.result(timeout_s=DEADLINE_S)["sum"] == 21
    assert [report.body["incarnation"] for report in job.reports_of("StepCompleted")] == [2]


def test_a_fit_that_asks_is_stopped_and_says_so(make_job):
    with make_job(script_spec("Patient")) as job:
        job.wait_for_report("StepCompleted", nth=3, timeout_s=DEADLINE_S)
        job.stop()
        assert job.result(timeout_s=DEADLINE_S)["steps"] >= 3
        assert job.reports_of("TrainerFinished")[0].body["stopped"] is True


def test_a_paused_fit_makes_no_calls_and_a_stop_ends_the_pause(make_job):
    job = make_job(script_spec("Patient"))
    job.on_report("StepCompleted", 2, job.pause)
    with job:
        job.wait_for_report("StepCompleted", nth=2, timeout_s=DEADLINE_S)
        with pytest.raises(TimeoutError):
            job.wait_for_report("StepCompleted", nth=3, timeout_s=0.2)
        job.stop()
        assert job.result(timeout_s=DEADLINE_S)["steps"] == 3


def test_a_trainer_is_busy_while_it_computes_and_not_while_it_waits(make_job, monkeypatch):
    monkeypatch.setattr(Thinker, "thinking", threading.Event())
    with make_job(script_spec("Thinker")) as job:
        host = job.vertex("trainer-0").host
        assert host.watch(1, 0, 0.0).busy == "fit"
        job.hang("worker-0")
        Thinker.thinking.set()
        deadline = time.monotonic() + DEADLINE_S
        while host.watch(1, 0, 0.005).busy:
            assert time.monotonic() < deadline
        job.wake("worker-0")
        job.result(timeout_s=DEADLINE_S)
        assert host.watch(1, 10, 0.0).busy == ""


def test_a_second_start_of_the_same_trainer_does_nothing(make_job):
    job = make_job(script_spec("Sum"))
    with job:
        host = job.vertex("trainer-0").host
        host.start_fit(1, 9, job.running, {"worker": 2}, False)
        job.result(timeout_s=DEADLINE_S)
        host.start_fit(1, 10, job.running, {"worker": 2}, False)
        assert host.join_fit(DEADLINE_S)
    assert len(job.reports_of("TrainerFinished")) == 1


def test_two_starts_at_the_same_time_are_one(make_job, monkeypatch):
    job = make_job(script_spec("Sum"))
    fits, start = [], threading.Thread.start

    def start_again_meanwhile(thread):
        if thread.name == "gyre-fit":
            fits.append(thread)
            if len(fits) == 1:
                host = job.vertex("trainer-0").host
                again = threading.Thread(
                    target=host.start_fit, args=(1, 9, job.running, {"worker": 2}, False)
                )
                start(again)
                again.join(0.3)  # it ends at once where nothing holds it
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_again_meanwhile)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert len(fits) == 1


def test_a_store_that_cannot_be_opened_is_not_the_users_fault(make_job, monkeypatch):
    def refuse(url, **options):
        raise StoreError(f"{url} is locked.")

    monkeypatch.setattr(sample_ledger, "open_store", refuse)
    with (
        pytest.raises(JobFailed, match=r"gyre\.db is locked\. \(trainer-0: call_failed"),
        make_job(failover=ONE_RESTART) as job,
    ):
        job.result(timeout_s=DEADLINE_S)
