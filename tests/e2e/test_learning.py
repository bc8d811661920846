"""A model learns, in the short form of `bench/learning.py`: addition, from a warm start that forgets to carry."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from gyre.api import RLJobBuilder
from gyre.api.demo import CONFIG
from tests.e2e.conftest import Shared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 48
ENDS_WITHIN_S = 500.0
ROLLOUT_KL = 1e-8
"""Per token, between an engine and the trainer of the same weights: both compute in float32."""


@pytest.mark.parametrize(
    ("micro_batches", "staleness"),
    [("fixed", 0), ("streamed", 1)],
    ids=lambda value: str(value),
)
def test_what_a_third_has_right_most_have_right_later(
    shared: Shared, micro_batches: str, staleness: int
) -> None:
    handle = shared.submit(job(micro_batches, staleness))
    view = handle.wait(ENDS_WITHIN_S)
    events = list(handle.events())
    accuracy = [event["body"]["accuracy"] for event in events if event["kind"] == "Evaluated"]
    assert accuracy[0] < 0.45
    assert accuracy[-1] > 0.75, accuracy
    steps = [event["body"]["metrics"] for event in events if event["kind"] == "StepCompleted"]
    assert max(step["staleness_max"] for step in steps) <= staleness
    if staleness == 0:
        assert max(step["rollout_kl"] for step in steps) < ROLLOUT_KL
    else:
        assert mean(step["staleness_mean"] for step in steps) > 0, "nothing was generated ahead"
    assert (view["job"]["result"]["prompts_lost"], view["job"]["result"]["trained_twice"]) == (0, 0)
    handle.close()


def job(micro_batches: str, staleness: int) -> RLJobBuilder:
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
            steps=STEPS,
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
