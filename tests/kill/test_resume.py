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
from gyre.store import Store, open_store
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import Process, short_home
from tests.kill.conftest import ENDS_WITHIN_S, Run
from tests.kill.gate import Gate
from tests.kill.jobs import STEPS, tiny_job

__all__ = ["short_home"]

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]


def spec_of(run: Run) -> dict[str, Any]:
    with open_store(run.handle.store_url) as store:
        return store.job(run.handle.job_id).spec


STRETCHES = ((5, 2, False), (STEPS, 2, True), (13, 2, False), (STEPS, 3, True), (STEPS, 1, False))
"""Of one job: how many steps it is told to make, with how many ranks, and whether it is stopped on the way."""


@pytest.mark.timeout(240)  # one job that is started five times
def test_an_ended_job_goes_on_to_the_weights_of_one_that_was_never_interrupted(
    start: Callable[..., Run], kill_home: Path, undisturbed_digest: str
) -> None:
    """Again and again: when it has succeeded with fewer steps, and when it was stopped in the middle. With other ranks,
    sums have another order, and so have the weights other last bits; nothing else differs."""
    with open_store(home(kill_home).database_url()) as store:
        uninterrupted = checksums(store, store.job("undisturbed").job_id)
    (steps, actors, _), *others = STRETCHES
    run = start(steps=steps, actors=actors)
    run.gate.open()
    view = run.handle.wait(60.0)
    assert (view["job"]["phase"], view["job"]["step"]) == ("succeeded", steps)
    for life, (steps, actors, stopped) in enumerate(others, start=2):
        came_to = view["job"]["step"]
        changes = [f"run.steps={steps}", "roles.rollout.total=1", f"roles.actor.total={actors}"]
        spec = apply_overrides(spec_of(run), changes)
        with pytest.raises(ConfigError, match=r"config.seed: 7 cannot become 8"):
            resume_job(run.handle.job_id, apply_overrides(spec, ["config.seed=8"]), home_path=kill_home)
        if stopped:
            run.gate.open_to(came_to + 4)
        handle = resume_job(run.handle.job_id, spec, home_path=kill_home)
        assert handle.job_id == run.handle.job_id
        again = Run(handle, ProcessFaults(handle), run.gate)
        with pytest.raises(Conflict, match="only one that has ended can go on"):
            resume_job(handle.job_id, home_path=kill_home)
        if stopped:
            again.faults.reach_step(came_to + 3)
            handle.stop("enough for today")
        run.gate.open()
        view = handle.wait(ENDS_WITHIN_S) if stopped or steps < STEPS else again.end()
        assert view["job"]["phase"] == ("stopped" if stopped else "succeeded")
        assert view["job"]["step"] == steps or (stopped and came_to + 3 <= view["job"]["step"] < steps)
        ranks = [one for one in view["vertices"] if one["role"] == "actor" and one["phase"] == "stopped"]
        assert {one["incarnation"] for one in ranks if one["rank"] < min(2, actors)} == {life}
        restored = [event["body"] for event in handle.events() if event["kind"] == "GangRestored"]
        assert {one["step"] for one in restored[-1:]} == {came_to}, "the end left a checkpoint"
        handle.close()
        with open_store(run.handle.store_url) as store:
            trained = checksums(store, run.handle.job_id)
        same = {step for step, checksum in trained.items() if checksum == uninterrupted[step]}
        if actors == 2:
            assert same == set(range(view["job"]["step"] + 1)), "bit by bit, however often it was interrupted"
    assert same < set(range(STEPS + 1))
    assert view["job"]["result"]["digest"] != undisturbed_digest
    with open_store(run.handle.store_url) as store:
        account = account_of(store.ledger(run.handle.job_id))
    assert account.lost == account.trained_twice == ()
    assert account.trained == account.drawn == STEPS * 16


def checksums(store: Store, job_id: str) -> dict[int, str]:
    """Of the weights after each step."""
    published = [event.body for event in store.journal(job_id).events() if event.kind == "WeightsPublished"]
    return {body["step"]: body["checksum"] for body in published}


def test_what_was_learned_of_memory_outlives_every_process_and_the_job(
    start: Callable[..., Run], kill_home: Path
) -> None:
    """A pass does not fit once. Then a rank dies, trainer and master do, the job ends, goes on, and a rank dies again:
    each time steps are trained again, and every pass fits."""
    never = {"checkpoint_every": 50, "evaluate_every": 50}
    run = start(steps=8, actor=("tests.kill.workloads", "HungryActor"), rollout_total=1, run=never)
    run.faults.reach_step(4)
    for victim in run.faults.kill("actor-1"):
        run.faults.replaced(victim)
    run.faults.reach_step(6)
    for victim in run.faults.kill("trainer-0", "master", "actor-0"):
        run.faults.replaced(victim)
    run.end(steps=8)
    run.gate.open_to(10)
    handle = resume_job(
        run.handle.job_id, apply_overrides(spec_of(run), ["run.steps=12"]), home_path=kill_home
    )
    again = Run(handle, ProcessFaults(handle), run.gate)
    again.faults.reach_step(9)
    for victim in again.faults.kill("actor-0"):
        again.faults.replaced(victim)
    again.end(steps=12)
    told = [event["body"] for event in handle.events() if event["kind"] == "PassesHalved"]
    assert [(one["role"], one["passes"]) for one in told] == [("actor", 2)]
    failed = [event["body"] for event in handle.events() if event["kind"] == "OperatorFailed"]
    assert [one["code"] for one in failed] == ["out_of_memory"]
    assert sum(event["kind"] == "GangRestored" for event in handle.events()) >= 4
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
