"""FSDP2's back end against plain torch: losses, gradients and steps are those of one process over transformers' own
model, however the rows are dealt and packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fsdp.work import CONFIG, MODELS, random_rows, read_back, take_plain_steps, take_steps
from tests.rank_pool import RankPool

STEPS = [random_rows(9, seed=1), random_rows(8, seed=2)]


def relative(found: Any, wanted: Any) -> float:
    scale = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(np.asarray(found) - np.asarray(wanted))) / max(scale, 1e-30)


def dealt(said: list[Any], ranks: int) -> list[Any]:
    return [np.concatenate(said[rank::ranks]) for rank in range(ranks)]


def agrees(told: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for rank, (mine, wanted) in enumerate(zip(told, dealt(plain["said"], len(told)), strict=True)):
        assert relative(mine["said"], wanted) < 1e-5, f"what rank {rank} says"
    first = told[0]
    assert all(one["losses"] == first["losses"] and one["norms"] == first["norms"] for one in told)
    assert relative(first["losses"], plain["losses"]) < 1e-5
    whole = {
        name: relative(first["gradients"][name], plain["gradients"][name]) for name in plain["gradients"]
    }
    assert first["gradients"].keys() == plain["gradients"].keys()
    total = relative(
        np.concatenate([first["gradients"][name].ravel() for name in sorted(whole)]),
        np.concatenate([plain["gradients"][name].ravel() for name in sorted(whole)]),
    )
    assert total < 1e-5, whole
    assert relative(first["norms"][0], plain["norms"][0]) < 1e-5
    # AdamW's first step has the sign of each gradient, also of those that are rounding alone.
    assert relative(first["norms"], plain["norms"]) < 1e-3


FAST = ("qwen3", "qwen3_moe")
KINDS = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_has_plain_torchs_steps(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder = folder_of(kind)
    (plain,) = pool.run(take_plain_steps, 1, folder, STEPS)
    told = pool.run(take_steps, 2, folder, CONFIG, STEPS)
    print(kind, told[0]["packing"], told[0]["losses"], plain["losses"], told[0]["norms"], plain["norms"])
    agrees(told, plain)
    ((said, missed),) = pool.run(read_back, 1, folder, told[0]["weights"], STEPS[0], tmp_path / "out")
    assert not missed
    assert not told[1]["weights"]
    assert relative(said, told[0]["after"]) < 1e-5
