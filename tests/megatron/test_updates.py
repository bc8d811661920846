"""Several updates a step over real ranks: the groups of each are dealt anew, and every layout makes plain torch's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import learner_work, test_actor, test_critic, work
from tests.megatron.checkpoints import checkpoint_work
from tests.megatron.work import CONFIG, LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

OPTIM = {"lr": 0.03, "eps": 0.03, "warmup_steps": 0, "epochs": 2, "mini_batches": 3}
LOSSES: dict[str, dict[str, Any]] = {
    "truncated": {"tis_imp_ratio_cap": 1.2, "clip_ratio_low": 0.02, "clip_ratio_high": 0.02},
    "engine": {"kl_loss_coef": 0.1, "kl_loss_type": "k2", "loss_agg_mode": "seq-mean-token-mean"},
}
STEPS = [
    [random_groups(0, 1), [], random_groups(1, 6)],
    [random_groups(7, 3), random_groups(10, 2)],
]
"""Dealt to the ranks they would be of very unequal numbers."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {
        name: test_actor.plain_torch({**CONFIG, "optim": OPTIM, "loss": loss}, STEPS)
        for name, loss in LOSSES.items()
    }


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize(
    ("loss", "layout"),
    [("truncated", "pp2"), ("truncated", "tp2-dp2"), ("engine", "dp2")],
)
def test_an_actors_updates_are_plain_torchs(
    pool: RankPool, plain: dict[str, Any], loss: str, layout: str
) -> None:
    config = config_of(layout, optim=OPTIM, loss=LOSSES[loss])
    results = pool.run(work.train, LAYOUTS[layout][0], config, STEPS)
    assert [told["updates"] for told in results[0]["metrics"]] == [6, 6]
    test_actor.same(results[0], plain[loss])
    assert all(result["state"] == results[0]["state"] for result in results)


def test_so_are_those_of_two_ranks_of_plain_torch(pool: RankPool, plain: dict[str, Any]) -> None:
    config = {**CONFIG, "optim": OPTIM, "loss": LOSSES["truncated"]}
    results = pool.run(learner_work.train_in_plain_torch, 2, config, STEPS)
    test_actor.same(results[0], plain["truncated"])
    assert results[0]["state"] == results[1]["state"]


def test_and_a_critics(pool: RankPool) -> None:
    config = {"loss": test_critic.PPO["loss"] | {"cliprange_value": 0.01}, "critic": {"optim": OPTIM}}
    expected = test_critic.plain_torch({**CONFIG, **config}, STEPS)
    assert expected["metrics"][0]["value_clipped"] > 0
    test_critic.same(pool.run(learner_work.train_critic, 2, config_of("dp2", **config), STEPS), expected)


def test_a_step_that_is_replayed_has_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    config = config_of("dp2", optim=OPTIM, loss=LOSSES["truncated"])
    ranks, steps = 2, [*STEPS, [random_groups(12, 4)]]
    work_of = partial(checkpoint_work.train_and_checkpoint, background=False)
    was = pool.run(work_of, ranks, config, steps, tmp_path)
    came = pool.run(learner_work.restore_and_train, ranks, config, steps, tmp_path)
    for mine, theirs in zip(came, was, strict=True):
        assert mine["at"] == theirs["at"]
        assert mine["after"]["metrics"] == theirs["after"]["metrics"]
        assert mine["after"]["state"] == theirs["after"]["state"]
