"""Checkpoints: written while training goes on, bit by bit in one layout, resharded into any other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron import work
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool

STEPS = [[random_groups(0, 4)], [random_groups(4, 3), random_groups(7, 2)], [random_groups(9, 4)]]


def written(pool: RankPool, layout: str, folder: Path, *, background: bool = True) -> list[dict[str, Any]]:
    folder.mkdir()
    work_of = partial(work.train_and_checkpoint, background=background)
    return pool.run(work_of, LAYOUTS[layout][0], config_of(layout), STEPS, folder)


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("layout", ["tp2", "alone", "dp2", "pp2", "dp2-whole"])
def test_a_restored_checkpoint_goes_on_bit_by_bit(pool: RankPool, layout: str, tmp_path: Path) -> None:
    """It was written while two more steps were trained, and they are trained again from it."""
    folder = tmp_path / "checkpoint"
    first = written(pool, layout, folder)
    again = pool.run(work.restore_and_train, LAYOUTS[layout][0], config_of(layout), STEPS, folder)
    for rank, (was, came) in enumerate(zip(first, again, strict=True)):
        assert came["at"] == was["at"], f"rank {rank}"
        assert came["after"]["metrics"] == was["after"]["metrics"]
        assert came["after"]["state"] == was["after"]["state"]
        assert came["warm"]["steps"] == 4
    assert again[0]["after"]["state"]["trained"] == [[0, 13]]


@pytest.fixture(scope="module")
def from_tp2(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resharded") / "checkpoint"
    return folder, written(pool, "tp2-dp2", folder, background=False)[0]


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("layout", ["alone", "dp2", "tp2-pp2", "pp2", "tp2-sequence"])
def test_it_is_loaded_in_any_layout(
    pool: RankPool, from_tp2: tuple[Path, dict[str, Any]], layout: str
) -> None:
    """Weights bit by bit; the steps after it as they would have been, but for the order in which sums are made."""
    folder, was = from_tp2
    came = pool.run(work.restore_and_train, LAYOUTS[layout][0], config_of(layout), STEPS, folder)[0]
    assert came["at"] == was["at"]
    for mine, theirs in zip(came["after"]["metrics"], was["after"]["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-5)
    for name, expected in was["after"]["weights"].items():
        np.testing.assert_allclose(came["after"]["weights"][name], expected, atol=1e-5, rtol=0, err_msg=name)


def test_what_is_not_whole_or_not_what_was_written_is_refused(
    pool: RankPool, from_tp2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert "no whole checkpoint" in pool.run(work.refused_restore, 1, config_of("alone"), tmp_path)[0]
    folder, _ = from_tp2
    book = json.loads((folder / "actor.json").read_text())
    assert book["step"] == book["policy_version"] == 1
    for changes, sentence in (
        ({"digest": "0" * 32}, "not those that were written"),
        ({"format": 0}, "format 0"),
    ):
        other = tmp_path / sentence.replace(" ", "-")
        other.mkdir()
        for file in folder.iterdir():
            (other / file.name).symlink_to(file)
        (other / "actor.json").unlink()
        (other / "actor.json").write_text(json.dumps({**book, **changes}))
        assert sentence in pool.run(work.refused_restore, 1, config_of("alone"), other)[0]
