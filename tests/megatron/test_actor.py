"""The actor over real ranks: every layout does what plain torch does in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gyre.workloads.base import WorkloadContext
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.hugging_face import to_names
from tests.megatron import work
from tests.megatron.pool import RankPool
from tests.megatron.work import CONFIG, LAYOUTS, config_of, random_groups, take_step

STRAIGHT = {"lr": 1.0, "eps": 1.0, "clip_norm": 1e9, "warmup_steps": 0, "weight_decay": 0.0}
"""AdamW whose first step is nearly the gradient itself, so that weights tell of gradients."""

TERMS = {
    "loss_agg_mode": "seq-mean-token-mean",
    "kl_loss_coef": 0.1,
    "entropy_coeff": 0.05,
    "tis_imp_ratio_cap": 1.2,
    "adv_estimator": "rloo",
}


def plain_torch(config: dict[str, Any], steps: work.Steps) -> dict[str, Any]:
    """Plain torch in one process, each step's groups in a single micro-batch."""
    actor = TorchActor()
    actor.context = WorkloadContext("j", "actor", 0, 1, config=config)
    actor.setup()
    actor.warm_start()
    metrics = [take_step(actor, [[group for part in parts for group in part]]) for parts in steps]
    named = to_names(dict(actor.model.named_parameters()), actor.model.config)
    return {"metrics": metrics, "weights": {name: t.detach().numpy() for name, t in named.items()}}


STEPS = [
    [random_groups(0, 3), [], random_groups(3, 1), random_groups(4, 5)],
    [random_groups(9, 1), random_groups(10, 4)],
]
"""Micro-batches of unequal size, one of them empty; some ranks get nothing of some."""


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    return plain_torch({**CONFIG, "optim": STRAIGHT}, STEPS[:1])


@pytest.fixture(scope="module")
def adam() -> dict[str, Any]:
    return plain_torch(CONFIG, STEPS)


def same(found: dict[str, Any], wanted: dict[str, Any], atol: float = 1e-5) -> None:
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-5)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, expected in wanted["weights"].items():
        np.testing.assert_allclose(found["weights"][name], expected, atol=atol, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_streamed_batch_is_plain_torchs(
    pool: RankPool, straight: dict[str, Any], layout: str
) -> None:
    ranks = LAYOUTS[layout][0]
    results = pool.run(work.train, ranks, config_of(layout, optim=STRAIGHT), STEPS[:1])
    same(results[0], straight)
    assert all(result["state"] == results[0]["state"] for result in results)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "tp2-dp2"])
def test_so_is_the_next_step(pool: RankPool, adam: dict[str, Any], layout: str) -> None:
    results = pool.run(work.train, LAYOUTS[layout][0], config_of(layout), STEPS)
    same(results[0], adam)
    assert results[0]["state"]["trained"] == [[0, 14]]
