"""A whole job in one process whose reward is veRL's function, as docs/rewards.md shows it."""

from __future__ import annotations

import pytest

from gyre.testing.in_process import InProcessJob
from tests.test_docs import FILES
from tests.waits import GENEROUS_S


@pytest.mark.slow
def test_a_job_trains_with_a_function_of_verl_s(tmp_path):
    (tmp_path / "verl_reward.py").write_text(FILES["verl_reward.py"].text)
    small = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32}
    spec = {
        "name": "verl-reward",
        "recipe": "grpo",
        "roles": {
            "actor": {},
            "rollout": {},
            "reward": {"entrypoint": "gyre.workloads.rewards:PythonReward"},
        },
        "config": {
            "seed": 3,
            "model": small,
            "task": {"digits": 2},
            "sampling": {"n": 2, "max_new_tokens": 3},
            "optim": {"lr": 1e-3},
            "reward": {
                "function": f"{tmp_path}/verl_reward.py:compute_score",
                "processes": 1,
                "timeout_s": GENEROUS_S,
            },
        },
        "run": {
            "steps": 2,
            "prompts_per_step": 4,
            "groups_per_firing": 2,
            "groups_per_micro_batch": 2,
            "evaluate_every": 2,
            "held_out": 4,
        },
    }
    with InProcessJob(spec, tmp_path / "job") as run:
        assert run.result(timeout_s=GENEROUS_S)["steps"] == 2
        account = run.account()
    assert account.trained == 8
    assert account.lost == ()
