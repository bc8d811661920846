"""A whole job in one process, with the real rollout plane on the actor's own devices and nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.api import RLJobBuilder
from gyre.testing.in_process import InProcessJob

DEADLINE_S = 100.0


def job(tmp_path: Path) -> InProcessJob:
    builder = (
        RLJobBuilder()
        .recipe("grpo")
        .device_per_node(2)
        .config(
            {
                "seed": 7,
                "task": {"digits": 1},
                "model": {
                    "layers": 1,
                    "hidden": 16,
                    "heads": 2,
                    "kv_heads": 1,
                    "mlp": 32,
                    "max_positions": 32,
                },
                "sampling": {"n": 2, "max_new_tokens": 4},
                "optim": {"lr": 1e-3},
                "warm_start": {"max_steps": 2, "batch": 8, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
            }
        )
        .run(
            steps=3,
            prompts_per_step=4,
            groups_per_firing=2,
            groups_per_micro_batch=2,
            checkpoint_every=2,
            evaluate_every=0,
        )
        .rollouts(max_running=8, kv_tokens=2048, report_interval_s=0.05)
        .with_collocation("actor", "rollout")
    )
    spec = builder.actor().total(1).rollout().total(1).reward().total(1).build().plan().spec
    return InProcessJob(spec.model_dump(mode="json"), tmp_path)


def test_with_nobody_else_the_trainer_s_device_generates_all_and_then_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(tmp_path) as run:
        result = run.result(timeout_s=DEADLINE_S)
    assert result["steps"] == 3
    assert (result["prompts_lost"], result["trained_twice"]) == (0, 0)
    told = [line.partition(" ") for line in capsys.readouterr().out.splitlines()]
    windows = [json.loads(body) for kind, _, body in told if kind == "WindowClosed"]
    assert len(windows) >= 3
    assert sum(window["tokens"] for window in windows) > 0
    assert {window["reason"] for window in windows} == {"nothing is left to generate"}
    opened = [json.loads(body) for kind, _, body in told if kind == "WindowOpened"]
    assert all("no remote instance" in window["reason"] for window in opened)
