"""The fork server of a job's cluster is killed: vertices that die afterwards are started by Ray itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from gyre.store import open_store
from tests.e2e.conftest import Process, command_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.kill,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]  # three vertices, each imported anew by Ray itself

DIE = ("reward-0", "actor-0", "rollout-0")


def test_vertices_are_replaced_without_it_and_nothing_is_lost(short_home: Path) -> None:
    job = Process.start(short_home, "demo", "--steps", "20")
    server = job.until(lambda: forks_workers(job))
    job.until(lambda: len(bodies(job, "StepCompleted")) >= 3)
    pids = {body["vertex"]: body["pid"] for body in bodies(job, "VertexStarted")}
    assert {psutil.Process(pids[name]).ppid() for name in DIE} == {server.pid}
    server.kill()
    for name in DIE:
        os.kill(pids[name], signal.SIGKILL)
    ended = job.end(300.0)
    assert ended.code == 0, ended.err
    assert "0 prompts lost, 0 trained twice" in ended.out + ended.err
    again = {body["vertex"] for body in bodies(job, "VertexStarted") if body["incarnation"] > 1}
    assert set(DIE) <= again
    job.nothing_left()


def forks_workers(job: Process) -> psutil.Process | None:
    children = psutil.Process(job.process.pid).children()
    return next((child for child in children if "local_ray.fork_server" in command_of(child)), None)


def bodies(job: Process, kind: str) -> list[dict[str, Any]]:
    if not (job.home / "gyre.db").exists():
        return []
    with open_store(f"sqlite:///{job.home / 'gyre.db'}") as store:
        jobs = store.jobs()
        events = store.journal(jobs[0].job_id).events() if jobs else ()
        return [event.body for event in events if event.kind == kind]
