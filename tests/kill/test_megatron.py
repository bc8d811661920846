"""A gang of Megatron ranks on a real Ray cluster: killed, restored, and the weights come out the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.embedded.tiny import CONFIGS, write_checkpoint
from tests.kill.conftest import Run
from tests.kill.test_kills import engine_of

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 9
JOB: dict[str, Any] = {
    "steps": STEPS,
    "actor": ("gyre.workloads.megatron", "MegatronActor"),
    "config": {
        "model": {"layers": 2, "hidden": 48, "heads": 2, "kv_heads": 2, "mlp": 96, "max_positions": 32},
        "megatron": {"tensor_parallel": 2, "pass_tokens": 256},
        "warm_start": {"max_steps": 20, "batch": 64, "lr": 1e-2, "slips": 0.3, "stop_at": 0.6},
    },
    "run": {"checkpoint_every": 4, "evaluate_every": 0},
    "rollout_total": 1,
    "stall_timeout_s": 60.0,
}


IN_MEMORY = {"tensor_parallel": 2, "pass_tokens": 256, "memory_checkpoint_share": 1.0}


def test_a_killed_rank_of_a_tensor_parallel_gang_changes_no_weight(start: Callable[..., Run]) -> None:
    """Its gang goes on from host memory; what a restore from the disk trains again, `tests/megatron` shows."""
    calm = start(**JOB).end(steps=STEPS)
    assert calm["incidents"] == []
    run = start(slack=1, **{**JOB, "config": {**JOB["config"], "megatron": IN_MEMORY}})
    run.faults.reach_step(6)  # between two checkpoints
    (victim,) = run.faults.kill("actor-1")
    # Two processes load torch and Megatron anew, which on a busy machine takes most of a minute.
    assert run.faults.replaced(victim, timeout_s=120.0).pid != victim.pid
    view = run.end(steps=STEPS)
    assert view["job"]["result"]["digest"] == calm["job"]["result"]["digest"]
    (incident,) = run.incidents_of(view, "actor-1")
    assert incident["scope"] == "region"
    restored = incident["evidence"]["restored"]
    assert (restored["source"], restored["checkpoint_step"]) == ("memory", 4)
    assert restored["step"] > 4


def test_an_engine_starts_over_the_folder_that_the_actor_reads(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """It is up when the first version comes, and serves that one; killed, it is started over what it served."""
    folder = write_checkpoint(tmp_path / "model", CONFIGS["qwen3"], shards=2)
    config = {**JOB["config"], "megatron": {"pass_tokens": 256, "model_path": str(folder)}}
    run = start(**{**JOB, "config": config, "actors": 1})
    run.faults.reach_step(2)
    agent = run.faults.find("rollout-0")
    engine = engine_of(agent)
    assert str(folder) in engine.cmdline()
    engine.kill()
    view = run.end(steps=STEPS)
    started = [
        event["body"]["details"]["version"]
        for event in run.handle.events()
        if event["kind"] == "RolloutsChanged" and event["body"]["what"] == "EngineStarted"
    ]
    assert started[0] == 0
    assert len(started) == 2
    assert started[1] > 0
    assert view["job"]["result"]["tokens"] > 0
