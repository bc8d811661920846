"""Jobs that a test hurts, and the undisturbed run that they are compared with."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gyre.api import RLJobBuilder
from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.api.job_replay import replay_job
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.kill.gate import Gate
from tests.kill.jobs import STEPS, tiny_job

ENDS_WITHIN_S = 120.0


@pytest.fixture(scope="session")
def kill_home(ray_cluster: str) -> Iterator[Path]:
    """The GYRE_HOME of the jobs that are hurt, which run on the suite's Ray cluster."""
    # A process of the job that ended last may still say its last words in there.
    with tempfile.TemporaryDirectory(prefix="gk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class HeldFaults(ProcessFaults):
    """Faults in a job that goes on no further than `slack` steps beyond the one that was last waited for."""

    def __init__(self, job: JobHandle, gate: Gate, *, slack: int) -> None:
        super().__init__(job)
        self._gate = gate
        self._slack = slack

    def reach_step(self, step: int, *, timeout_s: float = 120.0) -> dict[str, Any]:
        self._gate.open_to(step + self._slack)
        view = super().reach_step(step, timeout_s=timeout_s)
        assert not view["job"]["ended_at"], f"the job ended before it was hurt: {view['job']}"
        return view


@dataclass
class Run:
    """A job under attack. `end` waits for it and checks everything that must hold however it was hurt."""

    handle: JobHandle
    faults: ProcessFaults
    gate: Gate

    def end(self, *, steps: int = STEPS) -> dict[str, Any]:
        self.gate.open()
        view = self.handle.wait(ENDS_WITHIN_S)
        assert view["job"]["phase"] == "succeeded"
        result = view["job"]["result"]
        assert result["steps"] == steps
        assert result["prompts_lost"] == 0
        assert result["trained_twice"] == 0
        self._check_history(steps)
        with open_store(self.handle.store_url) as store:
            account = account_of(store.ledger(self.handle.job_id))
            assert account.lost == ()
            assert account.trained_twice == ()
            assert account.trained == account.drawn == steps * 16
            replay = replay_job(store, self.handle.job_id)
            assert replay.differences == []
        open_incidents = [i["id"] for i in view["incidents"] if i["outcome"] != "recovered"]
        assert open_incidents == [], view["incidents"]
        return view

    def _check_history(self, steps: int) -> None:
        versions, epochs = [], []
        for event in self.handle.events():
            if event["kind"] == "WeightsPublished":
                versions.append(event["body"]["version"])
            elif event["kind"] == "MasterStarted":
                epochs.append(event["body"]["epoch"])
        assert versions[-1:] == [steps], "the last step's weights were not published"
        assert versions == sorted(versions), "the version fell"
        assert epochs[:1] == [1], "no master took the job over"
        assert epochs == sorted(set(epochs)), "an epoch was used twice"

    def incidents_of(self, view: dict[str, Any], name: str) -> list[dict[str, Any]]:
        return [incident for incident in view["incidents"] if incident["vertex"] == name]


@pytest.fixture
def start(kill_home: Path) -> Iterator[Callable[..., Run]]:
    """Starts tiny jobs, and stops what a failed test leaves running. A job waits for its test (`gate.py`) when it is
    `slack` steps beyond the one that the test asked for: at least `max_staleness`, or the step itself may be held."""
    runs: list[Run] = []

    def begin(
        *, slack: int = 2, from_: str | Path | None = None, job: RLJobBuilder | None = None, **overrides: Any
    ) -> Run:
        config = {"gated": True, **overrides.pop("config", {})}
        job = (job or tiny_job(config=config, **overrides)).build()
        handle = job.submit(f"kill-{uuid.uuid4().hex[:8]}", home_path=kill_home, from_=from_)
        gate = Gate(home(kill_home).job_directory(handle.job_id))
        runs.append(Run(handle, HeldFaults(handle, gate, slack=slack), gate))
        return runs[-1]

    yield begin
    for run in runs:
        run.gate.open()
        handle = run.handle
        if not handle.status()["job"]["ended_at"]:
            handle.stop("the test failed")
            deadline = time.monotonic() + 30
            while not handle.status()["job"]["ended_at"] and time.monotonic() < deadline:
                time.sleep(0.1)
        handle.close()


@pytest.fixture(scope="session")
def undisturbed_digest(kill_home: Path) -> str:
    """Of the final weights of a run that nobody disturbs. With one instance: how many there are changes no token."""
    handle = (
        tiny_job(rollout_total=1, failover={"silence_timeout_s": 30.0})
        .build()
        .submit("undisturbed", home_path=kill_home)
    )
    run = Run(handle, ProcessFaults(handle), Gate(home(kill_home).job_directory(handle.job_id)))
    view = run.end()
    assert view["incidents"] == []
    handle.close()
    return str(view["job"]["result"]["digest"])
