"""A gang of Megatron ranks on a real Ray cluster: killed, restored, and the weights come out the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.embedded.tiny import CONFIGS, write_checkpoint
from tests.kill.conftest import Run
from tests.kill.test_first_weights import published
from tests.kill.test_kills import engine_of

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 9
JOB: dict[str, Any] = {
    "steps": STEPS,
    "actor": ("gyre.workloads.megatron", "MegatronActor"),
    "config": {"megatron": {"tensor_parallel": 2, "pass_tokens": 256}},
    "reward": "TokenSum",
    "run": {"checkpoint_every": 4, "evaluate_every": 0},
    "rollout_total": 1,
    "stall_timeout_s": 60.0,
}


def test_a_killed_rank_and_a_killed_engine_over_the_actor_s_folder_change_no_weight(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """An engine starts over the folder that the actor reads: it is up when the first version comes, and serves that
    one; killed, it is started over what it served. A rank's gang goes on from host memory; what a restore from the
    disk trains again, `tests/megatron` shows."""
    folder = write_checkpoint(tmp_path / "model", CONFIGS["qwen3"], shards=2)
    job = with_megatron(model_path=str(folder))
    calm = start(**job)
    calm_view = calm.end(steps=STEPS)
    assert calm_view["incidents"] == []
    assert len({one["checksum"] for one in published(calm.handle)}) == STEPS + 1, (
        "each step moved the weights"
    )

    run = start(slack=1, **with_megatron(model_path=str(folder), memory_checkpoint_share=1.0))
    run.faults.reach_step(2)
    engine = engine_of(run.faults.find("rollout-0"))
    assert str(folder) in engine.cmdline()
    engine.kill()
    run.faults.reach_step(6)  # between two checkpoints
    (victim,) = run.faults.kill("actor-1")
    # Two processes load torch and Megatron anew, which on a busy machine takes most of a minute.
    assert run.faults.replaced(victim, timeout_s=120.0).pid != victim.pid
    view = run.end(steps=STEPS)
    assert view["job"]["result"]["digest"] == calm_view["job"]["result"]["digest"]
    assert view["job"]["result"]["tokens"] > 0
    (incident,) = run.incidents_of(view, "actor-1")
    assert incident["scope"] == "region"
    restored = incident["evidence"]["restored"]
    assert (restored["source"], restored["checkpoint_step"]) == ("memory", 4)
    assert restored["step"] > 4
    started = [
        event["body"]["details"]["version"]
        for event in run.handle.events()
        if event["kind"] == "RolloutsChanged" and event["body"]["what"] == "EngineStarted"
    ]
    assert started[0] == 0
    assert len(started) == 2
    assert started[1] > 0


def with_megatron(**settings: Any) -> dict[str, Any]:
    """The job with more settings of its gang."""
    config = JOB["config"]
    return {**JOB, "config": {**config, "megatron": {**config["megatron"], **settings}}}
