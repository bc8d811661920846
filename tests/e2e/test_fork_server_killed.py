"""The fork server of a job's cluster is killed: vertices that die afterwards are started by Ray itself. Then the job's
store is moved away and put back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gyre.store import open_store
from tests.e2e.conftest import Process, command_of

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

AWAY_S = 10.0
DIE = ("reward-0", "actor-0", "rollout-0")


def test_vertices_are_replaced_without_it_and_a_store_that_was_away_and_nothing_is_lost(
    short_home: Path,
) -> None:
    job = Process.start(short_home, "demo", "--steps", "30", "--json")
    server = job.until(lambda: forks_workers(job))
    job.until(lambda: len(bodies(job, "StepCompleted")) >= 3)
    pids = {body["vertex"]: body["pid"] for body in bodies(job, "VertexStarted")}
    assert {psutil.Process(pids[name]).ppid() for name in DIE} == {server.pid}
    server.kill()
    for name in DIE:
        os.kill(pids[name], signal.SIGKILL)

    def replaced() -> bool:
        return set(DIE) <= {
            body["vertex"] for body in bodies(job, "VertexStarted") if body["incarnation"] > 1
        }

    job.until(replaced)
    before = len(bodies(job, "StepCompleted"))
    job.until(lambda: len(bodies(job, "StepCompleted")) > before)
    away = short_home / "away"
    away.mkdir()
    names = [file.name for file in short_home.glob("gyre.db*")]
    for name in names:
        os.rename(short_home / name, away / name)
    time.sleep(AWAY_S)
    assert not list(short_home.glob("gyre.db*"))
    for name in reversed(names):
        os.rename(away / name, short_home / name)

    ended = job.end()
    result = ended.json()
    assert (result["prompts_lost"], result["trained_twice"]) == (0, 0)
    assert bodies(job, "StoreReturned")
    with open_store(f"sqlite:///{short_home / 'gyre.db'}", create=False) as store:
        assert store.ledger(store.jobs()[0].job_id).audit().clean
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
