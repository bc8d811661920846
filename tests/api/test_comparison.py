"""Jobs side by side: what differs in their configurations, and means at the last step that all have made."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.comparison import compare, differences_of
from tests.api.test_now import view


def steps(count: int, reward: float) -> list[dict[str, Any]]:
    return [{"step": number, "reward_mean": reward, "seconds": 1.0} for number in range(1, count + 1)]


def test_only_what_differs_is_told() -> None:
    one = {"name": "a", "run": {"steps": 80, "seed": 0}, "roles": {"rollout": {"total": 2}}}
    other = {"name": "b", "run": {"steps": 80, "seed": 1}, "roles": {"rollout": {"total": 2}, "reward": {}}}
    assert differences_of([one, other]) == {"run.seed": ["0", "1"], "roles.reward": ["–", "{}"]}


def test_metrics_are_means_at_the_last_common_step() -> None:
    found = compare([view(), view()], [{}, {}], [steps(20, 0.5), [*steps(30, 0.1), *steps(0, 9.0)]])
    assert found.step == 20
    assert found.metrics["reward_mean"] == pytest.approx([0.5, 0.1])
    assert "entropy" not in found.metrics
    assert found.outcomes["phase"] == ["running", "running"]


def test_a_job_without_steps_is_compared_too() -> None:
    found = compare([view(), view()], [{}, {}], [steps(20, 0.5), []])
    assert found.step == 0
    assert found.metrics == {}
