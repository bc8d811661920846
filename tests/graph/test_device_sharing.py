"""Who stands on a role's devices beside it."""

from __future__ import annotations

from typing import Any

from gyre.config import parse_job
from gyre.graph import compile_job, neighbours_of

JOB: dict[str, Any] = {
    "name": "shared",
    "recipe": "grpo",
    "backend": "fsdp",
    "device_type": "GPU",
    "config": {
        "model_path": "models/some",
        "task": {"digits": 1},
        "sampling": {"n": 8},
        "optim": {"lr": 1e-6},
        "loss": {"kl_loss_coef": 0.001},
    },
    "rollouts": {"engine": "sglang", "engine_args": ["--tp", "2"], "local": 2},
    "run": {"steps": 2, "prompts_per_step": 64, "evaluate_every": 0},
    "roles": {"actor": {"total": 2}, "reference": {"total": 2}, "rollout": {"total": 1}, "reward": {}},
    "affinity": {"collocate": [["actor", "reference"]]},
}


def test_roles_on_the_same_devices_are_named_with_what_tells_what_they_take() -> None:
    spec = compile_job(parse_job(JOB)).spec
    found = {one["role"]: one for one in neighbours_of(spec, "actor", {"reference": 4})}
    assert found == {
        "reference": {
            "role": "reference",
            "module": "gyre.workloads.fsdp.reference",
            "name": "FsdpReference",
            "total": 4,
            "engine": "",
            "engine_args": [],
            "local": False,
        },
        "local_rollout": {
            "role": "local_rollout",
            "module": "gyre.workloads.rollout_vertices",
            "name": "RolloutInstance",
            "total": 2,
            "engine": "sglang",
            "engine_args": ["--tp", "2"],
            "local": True,
        },
    }
    assert {one["role"] for one in neighbours_of(spec, "reference")} == {"actor", "local_rollout"}
    assert neighbours_of(spec, "rollout") == neighbours_of(spec, "reward") == []
