"""Jobs side by side: what differs in their configurations, and means at the last step that all have made."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.comparison import compare, differences_of
from gyre.api.definition.whole_spec import whole_of
from tests.api.test_now import view


def steps(count: int, reward: float) -> list[dict[str, Any]]:
    return [{"step": number, "reward_mean": reward, "seconds": 1.0} for number in range(1, count + 1)]


def test_only_what_differs_is_told() -> None:
    one = {"name": "a", "run": {"steps": 80, "seed": 0}, "roles": {"rollout": {"total": 2}}}
    other = {"name": "b", "run": {"steps": 80, "seed": 1}, "roles": {"rollout": {"total": 2}, "reward": {}}}
    assert differences_of([one, other]) == {"run.seed": ["0", "1"], "roles.reward": ["–", "{}"]}


def test_metrics_are_means_at_the_last_common_step() -> None:
    found = compare([view(), view()], [{}, {}], [steps(20, 0.5), [*steps(30, 0.1), *steps(0, 9.0)]], now=0.0)
    assert found.step == 20
    assert found.metrics["reward_mean"] == pytest.approx([0.5, 0.1])
    assert "entropy" not in found.metrics
    assert found.outcomes["phase"] == ["running", "running"]


def test_a_job_without_steps_is_compared_too() -> None:
    found = compare([view(), view()], [{}, {}], [steps(20, 0.5), []], now=0.0)
    assert found.step == 0
    assert found.metrics == {}


def test_a_default_that_one_does_not_write_is_its_value() -> None:
    one = {"name": "a", "recipe": "grpo", "config": {"sampling": {"temperature": 0.6}}}
    found = differences_of([whole_of(one), whole_of({"name": "a", "recipe": "grpo"})])
    assert found == {"config.sampling.temperature": ["0.6", "1.0"]}
    assert whole_of({"of": "another Gyre"}) == {"of": "another Gyre"}


def test_what_they_cost_is_told_where_they_have_prices() -> None:
    priced, free = view(), view()
    priced["job"] |= {"priced_at": 1000.0, "price_per_hour": 4.0, "spent": 0.5, "ended_at": 0.0}
    found = compare([priced, free], [{}, {}], [[], []], now=1000.0 + 1800.0)
    assert found.outcomes["cost"] == ["2.50", "–"]
