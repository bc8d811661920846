"""Ctrl-C, SIGTERM and SIGKILL at a job in the foreground: the right status, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.store import JobRow, open_store
from tests.e2e.conftest import Process, command_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MODULE = "tests.e2e.workloads"

ENDLESS = f"""
name: endless
failover: {{drain_timeout_s: 5}}
roles:
  trainer: {{entrypoint: "{MODULE}:Endless"}}
  rollout: {{entrypoint: "{MODULE}:MyRollout"}}
"""


@pytest.fixture
def running(short_home: Path, tmp_path: Path) -> Iterator[Process]:
    """`gyre run` of a job without end, on a cluster of its own."""
    with endless(short_home, tmp_path) as process:
        yield process


@contextlib.contextmanager
def endless(home: Path, tmp_path: Path, ray_address: str = "") -> Iterator[Process]:
    file = tmp_path / "endless.yaml"
    file.write_text(ENDLESS)
    process = Process.start(home, "run", str(file), ray_address=ray_address)
    yield process
    if process.process.poll() is None:
        process.process.kill()
        process.process.communicate()


def row_of(process: Process) -> JobRow | None:
    """The job in the directory, once it is there."""
    path = process.home / "gyre.db"
    if not path.exists():
        return None
    with open_store(f"sqlite:///{path}") as store:
        return next(iter(store.jobs()), None)


def reach(process: Process, phase: str) -> None:
    def reached() -> bool:
        row = row_of(process)
        return row is not None and row.phase == phase

    process.until(reached)


def ends(process: Process, code: int) -> None:
    ended = process.end()
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    print(ended.err)
    process.nothing_left()


@pytest.mark.slow
def test_ctrl_c_while_ray_starts_and_again_while_the_job_is_placed(short_home: Path, tmp_path: Path) -> None:
    """In one home: what the first left would be in the way of the second."""
    with endless(short_home, tmp_path) as running:

        def ray_starts() -> bool:
            return any("gcs_server" in command_of(child) for child in running.seen)

        running.until(ray_starts)
        running.ctrl_c()
        ends(running, 130)
    with endless(short_home, tmp_path) as running:
        running.until(lambda: row_of(running))
        running.ctrl_c()
        ends(running, 130)


@pytest.mark.slow
def test_ctrl_c_while_it_trains_on_a_cluster_of_others(
    short_home: Path, tmp_path: Path, ray_cluster: str
) -> None:
    with endless(short_home, tmp_path, ray_cluster) as running:
        is_interrupted_while_it_trains(running)


@pytest.mark.slow
def test_an_impatient_ctrl_c_while_it_trains(running: Process) -> None:
    """On a cluster of its own, which ends with it."""
    is_interrupted_while_it_trains(running, times=3)


def is_interrupted_while_it_trains(running: Process, times: int = 1) -> None:
    reach(running, "running")
    for _ in range(times):
        running.ctrl_c()
    ends(running, 130)
    row = row_of(running)
    assert row is not None
    assert (row.phase, row.reason, row.message) == ("stopped", "stop_requested", "interrupted by Ctrl-C"), (
        story(running)
    )


@pytest.mark.slow
def test_a_killed_driver_takes_everything_along_and_its_name_comes_free_for_one_that_sigterm_ends_in_order(
    running: Process, tmp_path: Path
) -> None:
    """A SIGTERM to the whole group, as `timeout` and Slurm send it: where the local Ray went with it, the job could not
    end."""
    reach(running, "running")
    running.look()
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.end().code == -signal.SIGKILL
    running.no_process_left(60.0, but_agents=True)
    running.kill_agents()
    # Its files are swept, and its name is taken back, by whoever comes next.
    again = Process.start(running.home, "run", str(tmp_path / "endless.yaml"))

    def is_again() -> bool:
        row = row_of(again)
        return row is not None and row.phase == "running" and row.epoch == 1 and len(rows(again)) == 2

    again.until(is_again)
    again.look()
    assert os.getpgid(again.process.pid) == again.process.pid, "else the test would end itself"
    os.killpg(again.process.pid, signal.SIGTERM)
    ends(again, 143)
    assert [(row.phase, row.reason) for row in rows(again)] == [
        ("stopped", "stop_requested"),
        ("failed", "cluster_lost"),
    ]
    assert rows(again)[0].message == "interrupted by SIGTERM", story(again)


def rows(process: Process) -> list[JobRow]:
    with open_store(f"sqlite:///{process.home / 'gyre.db'}") as store:
        return store.jobs()


def story(process: Process) -> list[tuple[str, dict[str, object]]]:
    with open_store(f"sqlite:///{process.home / 'gyre.db'}") as store:
        return [(event.kind, event.body) for event in store.journal(store.jobs()[0].job_id).events()]
