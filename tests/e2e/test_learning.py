"""A model learns, in the short form of `bench/learning.py`: addition, from a warm start that forgets to carry."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from gyre.api import RLJobBuilder
from gyre.api.demo import CONFIG
from tests.e2e.conftest import Shared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ENDS_WITHIN_S = 500.0
ROLLOUT_KL = 1e-8
"""Per token, between an engine and the trainer of the same weights: both compute in float32."""


def test_what_a_third_has_right_most_have_right_later(shared: Shared) -> None:
    evaluations, steps = run(shared, job("streamed", staleness=1, steps=48))
    assert evaluations[0] < 0.45
    assert evaluations[-1] > 0.75, evaluations
    assert max(step["staleness_max"] for step in steps) <= 1
    assert mean(step["staleness_mean"] for step in steps) > 0, "nothing was generated ahead"


def test_where_nothing_is_generated_ahead_engine_and_trainer_have_the_same_weights(shared: Shared) -> None:
    _, steps = run(shared, job("fixed", staleness=0, steps=8))
    assert max(step["staleness_max"] for step in steps) == 0
    assert max(step["rollout_kl"] for step in steps) < ROLLOUT_KL


def run(shared: Shared, job: RLJobBuilder) -> tuple[list[float], list[dict[str, float]]]:
    """The accuracies of its evaluations, and the metrics of its steps."""
    handle = shared.submit(job)
    result = handle.wait(ENDS_WITHIN_S)["job"]["result"]
    assert (result["prompts_lost"], result["trained_twice"]) == (0, 0)
    events = list(handle.events())
    handle.close()
    return (
        [event["body"]["accuracy"] for event in events if event["kind"] == "Evaluated"],
        [event["body"]["metrics"] for event in events if event["kind"] == "StepCompleted"],
    )


def job(micro_batches: str, *, staleness: int, steps: int) -> RLJobBuilder:
    config: dict[str, Any] = {"seed": 0, **CONFIG, "loss": {"tis_imp_ratio_cap": 2.0}}
    return (
        RLJobBuilder()
        .node_num(1)
        .device_per_node(8)
        .device_type("CPU")
        .recipe("grpo")
        .config(config)
        .max_staleness(staleness)
        .run(
            steps=steps,
            prompts_per_step=128,
            groups_per_firing=32,
            groups_per_micro_batch=64,
            checkpoint_every=24,
            evaluate_every=12,
            held_out=256,
            micro_batches=micro_batches,
        )
        .actor()
        .total(2)
        .rollout()
        .total(1)
        .reward()
        .total(1)
        .end()
    )
