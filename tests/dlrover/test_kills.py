"""Real deaths of a DLRover job's processes: the job goes on, and says what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gyre.testing import ProcessFaults
from gyre_dlrover.api.builder import DLJobBuilder
from tests.dlrover import ppo, sft
from tests.waits import GENEROUS_S

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 40


def incarnations(job: Any) -> dict[str, int]:
    return {vertex["id"]: vertex["incarnation"] for vertex in job.handle.status()["vertices"]}


@contextmanager
def submitted(job: Any, name: str, gyre: dict[str, Any], **options: Any) -> Iterator[ProcessFaults]:
    """The job runs; its handle is closed at the end, also where the test fails."""
    assert job.submit(name, blocking=False, gyre=gyre, **options) == 0
    with closing(job.handle):
        yield ProcessFaults(job.handle)


def wait_for(path: Path, faults: ProcessFaults) -> None:
    faults.until(lambda view: path.exists() or None, f"{path.name} to be there", timeout_s=GENEROUS_S)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_an_elastic_role_goes_on_where_it_was(gyre_home: dict[str, Any], tmp_path: Path, fault: str) -> None:
    job = (
        DLJobBuilder()
        .device_type("CPU")
        .config({"folder": str(tmp_path), "steps": STEPS, "step_s": 0.1})
        .train(f"{sft.__name__}.train_from_where_it_was")
        .nproc_per_node(2)
        .build()
    )
    with submitted(job, f"dl-elastic-{fault}", gyre_home) as faults:
        wait_for(tmp_path / "step-005", faults)
        victim = faults.stop("elastic-1") if fault == "stop" else faults.kill("elastic-1")[0]
        faults.replaced(victim, timeout_s=GENEROUS_S)
        assert job.handle.wait(120)["job"]["phase"] == "succeeded"
        assert incarnations(job) == {"trainer-0": 1, "elastic-0": 2, "elastic-1": 2}
        written = [(tmp_path / f"step-{step:03}").read_text().split() for step in range(STEPS)]
        assert {total for total, _ in written} == {"2"}
        pids = [pid for _, pid in written]
        assert len(set(pids)) == 2, "each of the two gangs did its share"
        assert pids == sorted(pids, key=pids.index)


@pytest.mark.parametrize("victim", ["rollout-1", "actor-0", "trainer-0"])
def test_an_rl_job_begins_anew(gyre_home: dict[str, Any], tmp_path: Path, victim: str) -> None:
    job = ppo.described(tmp_path, steps=STEPS)
    with submitted(job, f"dl-anew-{victim}", gyre_home) as faults:
        wait_for(tmp_path / "step", faults)
        faults.kill(victim)
        assert job.handle.wait(120)["job"]["phase"] == "succeeded"
        assert set(incarnations(job).values()) == {2}
        assert json.loads((tmp_path / "result.json").read_text())["weights"] == ppo.expected(STEPS)


def test_with_role_level_failover_an_rl_job_goes_on(gyre_home: dict[str, Any], tmp_path: Path) -> None:
    job = ppo.described(tmp_path, steps=STEPS)
    with submitted(job, "dl-role", gyre_home, failover_exec_strategy=2) as faults:
        wait_for(tmp_path / "step", faults)
        faults.kill("reward-0")
        assert job.handle.wait(120)["job"]["phase"] == "succeeded"
        again = {vertex for vertex, incarnation in incarnations(job).items() if incarnation > 1}
        assert again == {"reward-0"}
        assert json.loads((tmp_path / "result.json").read_text())["weights"] == ppo.expected(STEPS)


def test_the_masters_death_costs_nothing(gyre_home: dict[str, Any], tmp_path: Path) -> None:
    job = ppo.described(tmp_path, steps=STEPS)
    with submitted(job, "dl-master", gyre_home) as faults:
        wait_for(tmp_path / "step", faults)
        faults.replaced(faults.kill("master")[0], timeout_s=GENEROUS_S)
        assert job.handle.wait(120)["job"]["phase"] == "succeeded"
        assert set(incarnations(job).values()) == {1}
        assert json.loads((tmp_path / "result.json").read_text())["weights"] == ppo.expected(STEPS)
