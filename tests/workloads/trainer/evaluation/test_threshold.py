"""Without a threshold there is an accuracy only of Gyre's own rewards of right and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import parse_job
from gyre.graph import compile_job
from gyre.workloads.trainer.evaluation.results import evaluation_of

PYTHON = {"entrypoint": "gyre.workloads.rewards:PythonReward"}


@pytest.mark.parametrize(
    ("reward", "config", "threshold"),
    [
        ({}, {}, 1.0),
        ({}, {"evaluation": {"threshold": 0.5}}, 0.5),
        (PYTHON, {"reward": {"function": "exact_match"}}, 1.0),
        (PYTHON, {"reward": {"function": "math_verify"}}, 1.0),
        (PYTHON, {"reward": {"function": "mine.py:format_reward"}}, None),
        (PYTHON, {"reward": {"function": "mine.py:exact_match"}}, None),
        (PYTHON, {"reward": {"function": "mine.py:f"}, "evaluation": {"threshold": 2, "n": 4}}, 2.0),
        ({"entrypoint": "mine:ExactMatchReward"}, {}, None),
        ({"entrypoint": "gyre.workloads.torch:TorchRewardModel"}, {}, None),
    ],
)
def test_what_is_right(reward: dict[str, Any], config: dict[str, Any], threshold: float | None) -> None:
    job = {"recipe": "grpo", "roles": {"actor": {}, "rollout": {}, "reward": reward}, "config": config}
    assert evaluation_of(compile_job(parse_job(job)).spec).threshold == threshold
