"""Every loss that a job may ask for, split in every way and pair of ways: metrics and weights are plain torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gyre.config.sections import ADV_ESTIMATORS, KL_TYPES, LOSS_AGG_MODES
from gyre.models.tensor_names import to_names
from gyre.rollouts.samples import Group
from gyre.workloads.base import WorkloadContext
from gyre.workloads.torch.actor import TorchActor
from tests.megatron import learner_work
from tests.megatron.work import CONFIG, LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {
        "adv_estimator": "gae",
        "lam": 0.95,
        "gamma": 0.99,
        "clip_ratio_high": 0.2,
        "kl_reward_coef": 0.05,
    },
    "grpo": {"kl_loss_coef": 0.1, "kl_loss_type": "k3", "loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {
        "adv_estimator": "dr_grpo",
        "clip_ratio_high": 0.2,
        "loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "dapo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"},
    "rloo": {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum", "kl_reward_coef": 0.02},
    "k1": {"kl_loss_coef": 0.3, "kl_loss_type": "k1"},
    "k2": {"kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    "entropy": {"entropy_coeff": 0.2},
    "truncated": {"tis_imp_ratio_cap": 1.1},
}
OPTIM = {"lr": 0.03, "eps": 0.03, "clip_norm": 0.5, "warmup_steps": 0}


def valued(start: int) -> list[Group]:
    draw = np.random.default_rng(start)
    groups = random_groups(start, 4)
    for sample in (sample for group in groups for sample in group.samples):
        sample.extras["values"] = draw.standard_normal(len(sample.token_ids)).astype(np.float32)
    return groups


GROUPS = {name: valued(4 * at) for at, name in enumerate(LOSSES)}


def test_the_table_has_all_that_can_be_asked_for() -> None:
    for key, choices, default in (
        ("adv_estimator", ADV_ESTIMATORS, "grpo"),
        ("loss_agg_mode", LOSS_AGG_MODES, "token-mean"),
        ("kl_loss_type", KL_TYPES, "k3"),
    ):
        assert {loss.get(key, default) for loss in LOSSES.values()} == set(choices)


@pytest.fixture(scope="module")
def plain() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each loss in turn, plain torch's metrics and weights after a step, on from the one before."""
    actor = TorchActor()
    actor.context = WorkloadContext("j", "actor", 0, 1, config={**CONFIG, "optim": OPTIM})
    actor.setup()
    found = []
    for name, loss in LOSSES.items():
        metrics = learner_work.step_by(actor, loss, GROUPS[name])
        named = to_names(dict(actor.backend.model.named_parameters()), actor.backend.model.architecture)
        found.append((metrics, {key: one.detach().numpy().copy() for key, one in named.items()}))
    return found


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("layout", ["tp2-pp2", "tp2-sequence", "pp2", "dp2", "tp2-dp2", "pp2-dp2"])
def test_a_step_by_each_loss_is_plain_torchs(
    pool: RankPool, plain: list[tuple[dict[str, Any], dict[str, Any]]], layout: str
) -> None:
    config = config_of(layout, optim=OPTIM)
    found = pool.run(learner_work.steps_by, LAYOUTS[layout][0], config, LOSSES, GROUPS)
    for name, mine, (metrics, weights) in zip(LOSSES, found[0], plain, strict=True):
        assert mine["metrics"] == pytest.approx(metrics, rel=2e-5, abs=1e-5), name
        for key, expected in weights.items():
            np.testing.assert_allclose(
                mine["weights"][key], expected, atol=1e-5, rtol=0, err_msg=f"{name}: {key}"
            )
