"""Real jobs that ended go on, and end as if they had never been interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gyre.api.home import home
from gyre.api.job_replay import replay_job
from gyre.api.resume import resume_job
from gyre.config.parse import apply_overrides
from gyre.errors import ConfigError, Conflict
from gyre.failover import state_from
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import Process, short_home
from tests.kill.conftest import Run
from tests.kill.gate import Gate
from tests.kill.jobs import STEPS, tiny_job

__all__ = ["short_home"]

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(300)]


def spec_of(run: Run) -> dict[str, Any]:
    with open_store(run.handle.store_url) as store:
        return store.job(run.handle.job_id).spec


@pytest.mark.parametrize(
    ("stopped", "actors"),
    [(True, 2), (False, 2), (True, 3), (False, 1)],
    ids=[
        "stopped in the middle",
        "succeeded with fewer steps",
        "stopped, and with a rank more",
        "and one less",
    ],
)
def test_an_ended_job_goes_on_to_the_weights_of_one_that_was_never_interrupted(
    start: Callable[..., Run], kill_home: Path, undisturbed_digest: str, stopped: bool, actors: int
) -> None:
    """With other ranks, sums have another order, and so have the weights other last bits; nothing else differs."""
    run = start(steps=STEPS if stopped else 8)
    if stopped:
        run.faults.reach_step(7)
        run.handle.stop("enough for today")
    run.gate.open()
    first = run.handle.wait(60.0)
    assert first["job"]["phase"] == ("stopped" if stopped else "succeeded")
    changes = [f"run.steps={STEPS}", "roles.rollout.total=1", f"roles.actor.total={actors}"]
    spec = apply_overrides(spec_of(run), changes)
    with pytest.raises(ConfigError, match=r"config.seed: 7 cannot become 8"):
        resume_job(run.handle.job_id, apply_overrides(spec, ["config.seed=8"]), home_path=kill_home)
    handle = resume_job(run.handle.job_id, spec, home_path=kill_home)
    again = Run(handle, ProcessFaults(handle), Gate(home(kill_home).job_directory(handle.job_id)))
    with pytest.raises(Conflict, match="only one that has ended can go on"):
        resume_job(handle.job_id, home_path=kill_home)
    view = again.end()
    assert handle.job_id == run.handle.job_id
    result = view["job"]["result"]
    assert (result["digest"] == undisturbed_digest) == (actors == 2)
    assert result["prompts_lost"] == result["trained_twice"] == 0
    ranks = [one for one in view["vertices"] if one["role"] == "actor" and one["phase"] == "stopped"]
    assert {one["incarnation"] for one in ranks if one["rank"] < min(2, actors)} == {2}
    restored = [event["body"] for event in handle.events() if event["kind"] == "GangRestored"]
    assert {one["step"] for one in restored[-1:]} == {first["job"]["step"]}, "the end left a checkpoint"
    with open_store(handle.store_url) as store:
        account = account_of(store.ledger(handle.job_id))
    assert account.lost == account.trained_twice == ()
    assert account.trained == account.drawn == STEPS * 16
    handle.close()


def test_a_job_whose_cluster_was_killed_goes_on_from_the_command_line(
    short_home: Path, tmp_path: Path, undisturbed_digest: str
) -> None:
    """Its master and its cluster went without writing an end: `gyre resume` sees it, and asks no master."""
    file = tmp_path / "job.yaml"
    spec = tiny_job(config={"gated": True}, failover={"silence_timeout_s": 30.0}).build().spec
    file.write_text(yaml.safe_dump({**spec.model_dump(mode="json"), "name": "orphan"}))
    running = Process.start(short_home, "run", str(file))

    def reached() -> bool:
        with open_store(home(short_home).database_url()) as store:
            rows = store.jobs()
            if not rows:
                return False
            Gate(home(short_home).job_directory(rows[0].job_id)).open_to(8)
            return state_from(store.journal(rows[0].job_id).snapshot()).job.step >= 7

    try:
        running.until(reached)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, which `until` has told
            os.kill(running.process.pid, signal.SIGKILL)
    assert running.end().code == -signal.SIGKILL
    running.no_process_left(60.0, but_agents=True)
    running.kill_agents()
    with open_store(home(short_home).database_url()) as store:
        (row,) = store.jobs(live=True)
        Gate(home(short_home).job_directory(row.job_id)).open()
        assert state_from(store.journal(row.job_id).snapshot()).job.ended_at is None
    again = Process.start(short_home, "resume", "orphan", "--json").end()
    view = again.json()
    job = view["job"]
    assert (job["job_id"], job["phase"]) == (row.job_id, "succeeded"), again.err
    assert (job["result"]["steps"], job["result"]["digest"]) == (STEPS, undisturbed_digest)
    assert job["result"]["prompts_lost"] == job["result"]["trained_twice"] == 0
    with open_store(home(short_home).database_url()) as store:
        kinds = [event.kind for event in store.journal(row.job_id).events()]
        assert kinds.index("ClusterLost") < kinds.index("JobContinued")
        account = account_of(store.ledger(row.job_id))
        assert account.lost == account.trained_twice == ()
        assert account.trained == account.drawn == STEPS * 16
        assert replay_job(store, row.job_id).differences == []
