"""The RL job in one process, under the real master: its calls, and deaths at chosen moments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gyre.config import JobSpec
from gyre.errors import JobFailed, UserCodeError
from gyre.testing import InProcessJob
from gyre_dlrover.api.builder import DLJob, DLJobBuilder
from tests.dlrover import failing as failing_module
from tests.dlrover import ppo

FAILING = failing_module.__name__


def test_the_trainer_drives_and_workers_call_each_other(tmp_path: Path) -> None:
    job = ppo.described(tmp_path, alone=True)
    with InProcessJob(job.to_gyre("ppo").spec, tmp_path) as run:
        result = run.result(timeout_s=60)
    assert len(result["weights"]) == 3
    assert result["said"] == [
        "ACTOR_2-0_2-0 is the actor",
        "ACTOR_2-1_2-1 is the actor",
        "ROLLOUT_2-0_1-0 is the rollout",
        "ROLLOUT_2-1_1-0 is the rollout",
    ]
    assert result["answers"][0] == "prompt 2.0 xxx by 0 with 2"
    assert result["answers"][4] == "prompt 2.4 xxx by 1 with 2"


def events(run: InProcessJob, kind: str) -> list[dict[str, Any]]:
    return [event.body for event in run.events if event.kind == kind]


def restarts(run: InProcessJob) -> dict[str, int]:
    """How many incarnations each vertex has had beyond its first."""
    found: dict[str, int] = {}
    for body in events(run, "VertexStarted"):
        found[body["vertex"]] = max(found.get(body["vertex"], 0), body["incarnation"] - 1)
    return {vertex: count for vertex, count in found.items() if count}


def test_by_default_a_death_restarts_the_whole_job(tmp_path: Path) -> None:
    job = ppo.described(tmp_path, alone=True)
    with InProcessJob(job.to_gyre("ppo").spec, tmp_path) as run:
        run.on("rollout.take", 3, lambda: run.kill("rollout-1"))
        result = run.result(timeout_s=60)
        again = restarts(run)
    assert len(result["weights"]) == 3
    assert set(again) == {"trainer-0", "actor-0", "actor-1", "rollout-0", "rollout-1", "reward-0"}
    assert set(again.values()) == {1}


def test_with_role_level_failover_only_the_worker_is_replaced(tmp_path: Path) -> None:
    job = ppo.described(tmp_path, alone=True)
    with InProcessJob(job.to_gyre("ppo", failover_exec_strategy=2).spec, tmp_path) as run:
        run.on("reward.take", 2, lambda: run.kill("reward-0"))
        result = run.result(timeout_s=60)
        again = restarts(run)
    assert len(result["weights"]) == 3
    assert again == {"reward-0": 1}


def test_with_role_level_failover_a_gang_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """The new ranks lack what the trainer told the old ones; its assertion fails, and it begins anew, alone."""
    job = ppo.described(tmp_path, alone=True)
    with InProcessJob(job.to_gyre("ppo", failover_exec_strategy=2).spec, tmp_path) as run:
        run.on("actor.rpc_each", 3, lambda: run.kill("actor-1"))
        result = run.result(timeout_s=60)
        again = restarts(run)
    assert len(result["weights"]) == 3
    assert again == {"actor-0": 1, "actor-1": 1, "trainer-0": 1}


def test_the_trainers_death_restarts_the_job(tmp_path: Path) -> None:
    job = ppo.described(tmp_path, alone=True)
    with InProcessJob(job.to_gyre("ppo").spec, tmp_path) as run:
        run.on("reward.take", 2, run.kill_trainer)
        result = run.result(timeout_s=60)
        again = restarts(run)
    assert len(result["weights"]) == 3
    assert set(again.values()) == {1}
    assert len(again) == 6


def failing(folder: Path, entrypoint: str, failures: int, **options: Any) -> JobSpec:
    """Two driving roles, of which one fails; in a job of two roles that restarts the job."""
    builder = DLJobBuilder().device_type("CPU").config({"folder": str(folder), "failures": failures})
    builder.workload("TRAINER", f"{FAILING}.{entrypoint}").resource(cpu=0.5)
    builder.workload("other", f"{FAILING}.Fails").env({"SHARE": "none"})
    return spec_of(builder.build(), **options)


def spec_of(job: DLJob, **options: Any) -> JobSpec:
    spec: JobSpec = job.to_gyre("job", **options).spec
    return spec


def test_an_exception_restarts_the_job_as_often_as_it_may(tmp_path: Path) -> None:
    with InProcessJob(failing(tmp_path, "Fails", 2, job_max_restart=2), tmp_path) as run:
        assert run.result(timeout_s=60) == {"value": "made it"}
        assert restarts(run) == {"trainer-0": 2, "other-0": 2}


def test_then_it_has_failed_with_the_users_traceback(tmp_path: Path) -> None:
    with (
        InProcessJob(failing(tmp_path, "Fails", 9, job_max_restart=1), tmp_path) as run,
        pytest.raises(UserCodeError) as raised,
    ):
        run.result(timeout_s=60)
    assert "two and two are five" in str(raised.value)
    assert "failing.py" in raised.value.details["traceback"]


def test_without_failover_the_first_exception_ends_the_job(tmp_path: Path) -> None:
    with (
        InProcessJob(failing(tmp_path, "Fails", 1, failover_exec_strategy=0), tmp_path) as run,
        pytest.raises(UserCodeError, match="two and two are five"),
    ):
        run.result(timeout_s=60)
    assert len((tmp_path / "tries-TRAINER_1-0_1-0").read_text()) == 1


def test_a_worker_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    spec = failing(tmp_path, "Fails", 0, job_max_restart=0)
    spec.config["dlrover"]["roles"][1]["workload"]["entry_point"] = f"{FAILING}.Refuses"
    with InProcessJob(spec, tmp_path) as run, pytest.raises(UserCodeError, match="cannot be made") as raised:
        run.result(timeout_s=60)
    assert "failing.py" in raised.value.details["traceback"]


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("NoMain", "has no run(), and the job would wait for it for ever"),
        ("Failz", "has no function or class 'Failz'; did you mean 'Fails'?"),
    ],
)
def test_an_entrypoint_that_is_none_ends_the_job_at_once(tmp_path: Path, entrypoint: str, said: str) -> None:
    with (
        InProcessJob(failing(tmp_path, entrypoint, 0), tmp_path) as run,
        pytest.raises(JobFailed, match=re.escape(said)),
    ):
        run.result(timeout_s=60)
    assert restarts(run) == {}


def test_workers_meet_in_every_way(tmp_path: Path) -> None:
    builder = DLJobBuilder().device_type("CPU").config({"folder": str(tmp_path)})
    builder.workload("TRAINER", f"{FAILING}.keep_books").resource(cpu=0.5)
    builder.workload("BOOKS", f"{FAILING}.Bookkeeper").not_driver()
    builder.workload("COUNTERS", f"{FAILING}.count").total(2)
    with InProcessJob(spec_of(builder.build()), tmp_path) as run:
        result = run.result(timeout_s=60)
    refused, missing = result.pop("refused"), result.pop("missing")
    assert result == {
        "counts": [1, 2, 3],
        "found": ["a entry", "a entry"],
        "greetings": ["BOOKS_1-0_1-0 greets the trainer"],
        "got": [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15, 16],
        "roles": {"TRAINER": 1, "BOOKS": 1, "COUNTERS": 2},
        "none": [],
        "scattered": [11, 22],
        "own": [8],
    }
    assert refused.startswith("UserCodeError(ValueError): books-0.refuse raised ValueError: no ink")
    assert "exports no RPC method 'nobody'" in missing
