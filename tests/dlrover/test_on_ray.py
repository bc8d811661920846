"""Jobs written for DLRover, on a real Ray cluster: what its simplest examples do, and an RL job whose workers call each
other."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gyre_dlrover.api.builder import DLJobBuilder
from tests.dlrover import calling, ppo, sft

pytestmark = [pytest.mark.ray, pytest.mark.landing]


def test_elastic_training_by_a_function(gyre_home: dict[str, Any], tmp_path: Path) -> None:
    job = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(2)
        .device_type("CPU")
        .config({"folder": str(tmp_path)})
        .global_env({"E0": "v0"})
        .train(f"{sft.__name__}.train")
        .nnodes(2)
        .nproc_per_node(2)
        .end()
        .build()
    )
    assert job.submit("dl-train", gyre=gyre_home) == 0
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(4)] == [
        f"ELASTIC_4-{rank}_2-{rank % 2} {rank} 4 {rank % 2} 2 {rank // 2} dl-train ELASTIC 10 v0"
        for rank in range(4)
    ]
    with closing(job.handle):
        assert job.handle.status()["job"]["phase"] == "succeeded"


@pytest.mark.slow
def test_an_rl_job_whose_workers_call_each_other(gyre_home: dict[str, Any], tmp_path: Path) -> None:
    job = ppo.described(tmp_path)
    assert job.submit("dl-ppo", gyre=gyre_home) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["weights"] == ppo.expected(3)
    assert result["said"][0] == "ACTOR_2-0_2-0 is the actor"
    assert result["answers"][0] == "prompt 2.0 xxx by 0 with 2"
    assert result["answers"][4] == "prompt 2.4 xxx by 1 with 2"


@pytest.mark.slow
def test_a_script_and_an_exception(
    gyre_home: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script's ranks run beside a role that raises, again after the one restart that is allowed."""
    builder = DLJobBuilder().device_type("CPU").config({"folder": str(tmp_path)})
    builder.role("script").train(f"{Path(__file__).parent}/script.py --folder {tmp_path}").total(2)
    builder.workload("raises", f"{sft.__name__}.raises")
    job = builder.build()
    assert job.submit("dl-raises", job_max_restart=1, gyre=gyre_home) == 1
    told = capsys.readouterr().err
    assert "ArithmeticError: rank 0 cannot add" in told
    assert "sft.py" in told
    assert (tmp_path / "tries-0").read_text() == "xx"
    assert [(tmp_path / f"script-{rank}").read_text() for rank in (0, 1)] == [f"--folder {tmp_path}"] * 2


def test_more_calls_wait_in_a_worker_than_it_has_threads(gyre_home: dict[str, Any]) -> None:
    builder = DLJobBuilder().device_type("CPU")
    builder.workload("TRAINER", f"{calling.__name__}.wait_for_each_other").resource(cpu=0.5)
    builder.workload("OFFICE", f"{calling.__name__}.Office").not_driver()
    builder.workload("BRANCH", f"{calling.__name__}.Office").not_driver()
    job = builder.build()
    assert job.submit("dl-waiting", gyre=gyre_home) == 0
    result = job.handle.status()["job"]["result"]
    assert result["letters"] == [f"letter {number}" for number in range(calling.WAITING)]
    assert (result["opened"], result["asked"]) == (True, 4)
