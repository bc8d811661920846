"""FSDP2's classes keep their contracts, on one rank with a Gloo group of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fsdp.learner_work import CONFIG, PPO, check, of_folder, save_reward_model
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("actor", "", {}),
        ("critic", "mistral", PPO),
        ("critic", "", PPO),
        ("actor", "mistral", {}),
        ("actor", "mistral", {"lora": {"rank": 4}}),
    ],
)
def test_a_learner_in_fsdp_keeps_its_contract(
    pool: RankPool,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    kind: str,
    changes: dict[str, Any],
) -> None:
    config = of_folder(folder_of(kind)) if kind else CONFIG
    pool.run(check, 1, name, {**config, **changes}, tmp_path)


def test_a_reference_in_fsdp_keeps_its_contract(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    pool.run(check, 1, "reference", of_folder(folder_of("mistral")), tmp_path)


def test_a_reward_model_in_fsdp_keeps_its_contract(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_reward_model, 1, "mistral", tmp_path / "rm", 1)
    pool.run(check, 1, "reward", {**CONFIG, "reward_model": {"path": str(tmp_path / "rm")}}, tmp_path)
