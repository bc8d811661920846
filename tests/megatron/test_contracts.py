"""Megatron's classes keep their contracts, on one rank with a Gloo group of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.testing.contracts import check_reward
from gyre.workloads.torch.reward_model import TorchRewardModel
from tests.megatron import work
from tests.megatron.contract_work import check
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.test_reward_model import write_reward_model
from tests.megatron.work import CONFIG
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

PPO = {"loss": {"adv_estimator": "gae"}}


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    ("name", "changes"),
    [("actor", {}), ("actor", {"megatron": {"memory_checkpoint_share": 0.5}}), ("critic", PPO)],
    ids=["actor", "actor with states in memory", "critic"],
)
def test_a_learner_in_megatron_keeps_its_contract(
    pool: RankPool, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    pool.run(check, 1, name, {**CONFIG, **changes}, tmp_path)


def test_a_reference_in_megatron_keeps_its_contract(pool: RankPool, tmp_path: Path) -> None:
    folder = work.write_folder(tmp_path / "policy", FAMILIES["qwen3"])
    pool.run(check, 1, "reference", {**CONFIG, "megatron": {"model_path": str(folder)}}, tmp_path)


def test_reward_models_keep_their_contract(pool: RankPool, tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "rm", "qwen3")
    config = {**CONFIG, "reward_model": {"path": str(folder)}}
    pool.run(check, 1, "reward", config, tmp_path)
    check_reward(TorchRewardModel, config=config)
