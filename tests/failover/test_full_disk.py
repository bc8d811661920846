"""No room on a disk is a state: nothing of it is paid for, the job says it, and it has an end."""

from __future__ import annotations

import pytest

from gyre.config import Budget
from gyre.errors import NO_SPACE
from gyre.failover import JobPhase, Reason, VertexPhase, rows_of, state_from
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.handlers.full_disk import AFTERMATH_S, SAID
from tests.failover.histories import History, coordinator_of, spec_with

MIB = 2**20
FULL = e.DiskFilled("/home/gyre", 64 * MIB, 3 * MIB)
ROOM = e.DiskHasRoom("/home/gyre", 900 * MIB)


@pytest.fixture
def running(history: History) -> History:
    history.start_all().step()
    return history


@pytest.mark.parametrize(
    ("vertex", "fault"),
    [
        ("rollout-0", "dies"),
        ("reward-0", "dies"),
        ("reward-0", "raises in setup"),
        ("actor-0", "dies"),
        ("actor-1", "raises"),
        ("trainer-0", "dies"),
        ("trainer-0", "raises"),
        ("reward-0", "raises"),
    ],
)
def test_whatever_fails_while_a_disk_is_full_is_not_paid_for(
    running: History, vertex: str, fault: str
) -> None:
    running.decide(FULL)
    for attempt in range(1, 51):
        running.fail(vertex, fault, attempt=attempt)
    assert not running.state.uses
    assert running.state.job.phase is not JobPhase.STOPPING
    running.decide(ROOM)
    running.start_all().step()
    assert (running.state.job.phase, running.state.job.reason) == (JobPhase.RUNNING, Reason.NONE)


def test_the_job_says_what_is_required_what_is_available_and_where(running: History) -> None:
    running.decide(FULL)
    job = running.state.job
    assert (job.phase, job.reason) == (JobPhase.RUNNING, Reason.DISK_FULL)
    assert "disk of /home/gyre: required 64.0 MiB, available 3.0 MiB" in job.message
    running.decide(e.DiskFilled("/dev/shm", MIB, 0, node="n7"))
    assert "on n7, and 1 more" in running.state.job.message or "and 1 more" in running.state.job.message
    running.lose("rollout-0")
    assert (running.state.job.phase, running.state.job.reason) == (JobPhase.RECOVERING, Reason.DISK_FULL)
    running.decide(ROOM)
    assert running.state.job.reason is Reason.DISK_FULL
    running.decide(e.DiskHasRoom("/dev/shm", 9 * MIB, node="n7"))
    assert (running.state.job.reason, running.state.job.message) == (Reason.NONE, "")


def test_the_state_is_in_the_rows(running: History) -> None:
    assert rows_of(running.state)["job", "job"]["full_disks"] == {}
    running.decide(FULL)
    assert state_from(rows_of(running.state)) == running.state
    running.decide(ROOM)
    assert state_from(rows_of(running.state)) == running.state


def test_a_death_in_the_aftermath_is_the_disks_and_a_later_one_is_not(running: History) -> None:
    running.decide(FULL)
    running.decide(ROOM)
    running.lose("rollout-0")
    assert not running.state.uses
    running.start("rollout-0")
    running.now += AFTERMATH_S
    running.lose("rollout-0")
    assert running.state.uses


def test_the_state_has_a_deadline(running: History) -> None:
    timer = next(one for one in running.decide(FULL).commands if isinstance(one, c.SetTimer))
    assert timer.at == running.now + running.coordinator.spec.failover.wait_for_room_s
    running.decide(e.TimerFired(timer.timer), after_s=timer.at - running.now)
    assert (running.state.job.phase, running.state.job.reason) == (JobPhase.STOPPING, Reason.DISK_FULL)
    assert "required 64.0 MiB" in running.state.job.message


def test_the_deadline_of_an_earlier_time_ends_nothing(running: History) -> None:
    timer = next(one for one in running.decide(FULL).commands if isinstance(one, c.SetTimer))
    running.decide(ROOM)
    running.decide(FULL)
    running.decide(e.TimerFired(timer.timer))
    assert running.state.job.phase is JobPhase.RUNNING


def test_a_job_that_is_stopped_ends_while_the_disk_is_full(running: History) -> None:
    running.decide(FULL)
    running.lose("rollout-0")
    running.decide(e.StopRequested("enough"))
    running.report(e.TrainerFinished, result={}, stopped=True)
    running.stop_all()
    assert running.state.job.phase is JobPhase.STOPPED


# -- a write that failed says it --------------------------------------------------------------------


def test_a_write_that_failed_begins_the_state(running: History) -> None:
    running.report(
        e.TrainerFailed, error="OSError: [Errno 122] …", traceback="", user_code=False, code=NO_SPACE
    )
    assert running.state.job.reason is Reason.DISK_FULL
    assert running["trainer-0"].phase is VertexPhase.STARTING
    assert not running.state.incidents["trainer-0/1/vertex"].user_code
    assert set(running.state.uses) == {"disk:trainer-0"}
    (disk,) = running.state.job.full_disks.values()
    running.decide(e.DiskHasRoom(disk["where"], 0, disk["node"]))
    running.start_all()
    assert (running.state.job.phase, running.state.job.reason) == (JobPhase.RUNNING, Reason.NONE)


@pytest.mark.parametrize(
    "words",
    [
        "OSError: [Errno 28] No space left on device: '/x'",
        "OSError: [Errno 122] Disk quota exceeded",
        "sqlite3.OperationalError: database or disk is full",
    ],
)
def test_the_words_of_a_dead_process_say_it_too(running: History, words: str) -> None:
    running.lose("reward-0", error=words)
    assert running.state.job.reason is Reason.DISK_FULL
    assert next(iter(running.state.incidents.values())).cause == "disk_full"


def test_words_that_nobody_can_confirm_end_a_job_at_last() -> None:
    spec = spec_with(vertex=Budget(max=2, window_s=1e9), job=Budget(max=1, window_s=1e9))
    history = History(coordinator_of(spec)).submit().start_all()
    for _ in range(SAID.most_attempts + 10):
        if history.state.job.phase is JobPhase.STOPPING:
            break
        history.now += 2 * AFTERMATH_S
        history.lose("reward-0", error="No space left on device")
        for disk in list(history.state.job.full_disks.values()):
            history.decide(e.DiskHasRoom(disk["where"], 0, disk["node"]))
        history.now += 2 * AFTERMATH_S
        history.start_all()
    assert history.state.job.phase is JobPhase.STOPPING
