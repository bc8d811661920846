"""PPO on a real Ray cluster: actor and critic in processes of their own come to what they come to in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.api import RLJobBuilder
from gyre.api.home import home
from gyre.testing.in_process import InProcessJob
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import Shared
from tests.kill.gate import Gate

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = {
    "seed": 3,
    "task": {"digits": 2},
    "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32},
    "sampling": {"n": 4, "max_new_tokens": 3},
    "optim": {"lr": 1e-3},
    "critic": {"optim": {"lr": 1e-3}},
    "warm_start": {"max_steps": 3, "batch": 8, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
}


def ppo_job(*, gated: bool = False) -> RLJobBuilder:
    builder = RLJobBuilder().node_num(1).device_per_node(8).device_type("CPU").recipe("ppo")
    builder = builder.config(CONFIG | {"gated": gated})
    builder = builder.run(
        steps=8,
        prompts_per_step=8,
        groups_per_firing=4,
        groups_per_micro_batch=4,
        checkpoint_every=3,
        evaluate_every=0,
    )
    builder = builder.failover(backoff_s=0.1).actor().total(1).critic().total(1)
    return (
        builder.rollout("gyre.workloads.torch", "TorchRollout")
        .reward("tests.e2e.workloads", "TokenSum")
        .end()
    )


def test_a_killed_critic_leaves_no_trace_in_the_weights(shared: Shared, tmp_path: Path) -> None:
    with InProcessJob(ppo_job().build().spec, tmp_path) as alone:
        expected = alone.result(timeout_s=60)["digest"]
    handle = shared.submit(ppo_job(gated=True))
    gate = Gate(home(shared.home).job_directory(handle.job_id))
    faults = ProcessFaults(handle)
    gate.open_to(3)
    faults.reach_step(2)
    (victim,) = faults.kill("critic-0")
    assert faults.replaced(victim).pid != victim.pid
    gate.open()
    result = handle.wait()["job"]["result"]
    handle.close()
    assert result["digest"] == expected
    assert (result["steps"], result["prompts_lost"], result["trained_twice"]) == (8, 0, 0)
