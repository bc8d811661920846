"""Checkpoints: written while training goes on, bit by bit in one layout, resharded into any other."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.workloads.gang.state_files import sealed
from tests.megatron import work
from tests.megatron.checkpoints import checkpoint_work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.other_checkpoints import write_beginnings
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = [[random_groups(0, 4)], [random_groups(4, 3), random_groups(7, 2)], [random_groups(9, 4)]]


def written(pool: RankPool, layout: str, folder: Path, *, background: bool = True) -> list[dict[str, Any]]:
    folder.mkdir()
    work_of = partial(checkpoint_work.train_and_checkpoint, background=background)
    return pool.run(work_of, LAYOUTS[layout][0], config_of(layout), STEPS, folder)


def test_it_is_on_the_disk_when_it_is_said_to_be_written(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    what = checkpoint_work.what_is_not_on_the_disk
    assert pool.run(what, 1, config_of("alone"), STEPS, folder) == [[]]
    assert any(folder.iterdir())


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize(
    "layout", ["tp2-memory", "alone", "dp2", "pp2", "dp2-whole", "tp2", "dp2-whole-memory"]
)
def test_a_restored_checkpoint_goes_on_bit_by_bit(pool: RankPool, layout: str, tmp_path: Path) -> None:
    """It was written while two more steps were trained, and they are trained again from it. With host memory it is
    written from there, while the states of those steps are kept, too."""
    folder = tmp_path / "checkpoint"
    first = written(pool, layout, folder)
    again = pool.run(checkpoint_work.restore_and_train, LAYOUTS[layout][0], config_of(layout), STEPS, folder)
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


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("layout", ["tp2-pp2", "alone", "dp2", "pp2", "tp2-sequence"])
def test_it_is_loaded_in_any_layout(
    pool: RankPool, from_tp2: tuple[Path, dict[str, Any]], layout: str
) -> None:
    """Weights bit by bit; the steps after it as they would have been, but for the order in which sums are made."""
    folder, was = from_tp2
    came = pool.run(checkpoint_work.restore_and_train, LAYOUTS[layout][0], config_of(layout), STEPS, folder)[
        0
    ]
    assert came["at"] == was["at"]
    for mine, theirs in zip(came["after"]["metrics"], was["after"]["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-5)
    for name, expected in was["after"]["weights"].items():
        np.testing.assert_allclose(came["after"]["weights"][name], expected, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replicas_become_shares_of_a_layer(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    """Each replica wrote a share of the weights, and a range of the optimizer's state."""
    config = config_of("dp2")
    config["megatron"]["dtype"] = dtype
    was = pool.run(
        partial(checkpoint_work.train_and_checkpoint, background=False), 2, config, STEPS, tmp_path
    )[0]
    config = config_of("tp2")
    config["megatron"]["dtype"] = dtype
    came = pool.run(checkpoint_work.restore_and_train, 2, config, STEPS, tmp_path)[0]
    assert came["at"] == was["at"]
    rel = 2e-5 if dtype == "float32" else 0.1  # layouts that train from the start differ by 4 % in bfloat16
    for mine, theirs in zip(came["after"]["metrics"], was["after"]["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=rel, abs=1e-3)


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    pool: RankPool, tmp_path: Path
) -> None:
    config, whole, cut = config_of("tp2"), tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    calm = pool.run(work.train, 2, config, STEPS)
    with pytest.raises(AssertionError, match="rank 1 died"):
        pool.run(checkpoint_work.checkpoint_and_die, 2, config, STEPS, whole, cut)
    assert (cut / "rank_00001.state").exists()
    assert not (cut / "rank_00001.json").exists()
    assert not (cut / "actor.json").exists()
    for was, came in zip(
        calm, pool.run(checkpoint_work.restore_in_turn, 2, config, STEPS, [cut, whole]), strict=True
    ):
        assert "no whole checkpoint" in came["refusals"][0]
        assert came["after"] == {"metrics": was["metrics"][1:], "state": was["state"]}


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("harm", ["flipped", "short", "missing"])
def test_a_damaged_checkpoint_is_refused_by_all_ranks_which_can_take_another(
    pool: RankPool, from_tp2: tuple[Path, dict[str, Any]], tmp_path: Path, harm: str
) -> None:
    """Also by those whose own part is whole; nothing is changed before that is known."""
    folder, was = from_tp2
    harmed = tmp_path / "harmed"
    shutil.copytree(folder, harmed)
    state = harmed / "rank_00002.state"
    if harm == "flipped":
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
    elif harm == "short":
        os.truncate(state, state.stat().st_size - 1)
    else:
        state.unlink()
    found = pool.run(checkpoint_work.restore_in_turn, 2, config_of("tp2"), STEPS, [harmed, folder])
    for one in found:
        before, refused, after = one["states"]
        assert before == refused
        assert "is damaged" in one["refusals"][0]
        assert after == was["at"]


def test_the_checkpoint_of_the_first_model_has_no_weights_and_takes_them_from_where_they_were(
    pool: RankPool, tmp_path: Path
) -> None:
    model = work.write_folder(tmp_path / "model", FAMILIES["qwen3-tied"])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = config_of("dp2")
    config["megatron"]["model_path"] = str(model)
    was = pool.run(checkpoint_work.checkpoint_first_model, 2, config, STEPS, folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 50_000
    came = pool.run(checkpoint_work.restore_first_model, 2, config, STEPS, folder)
    assert came == was
    config["megatron"] |= {"tensor_parallel": 2}
    assert (
        pool.run(checkpoint_work.restore_first_model, 2, config, STEPS[:1], folder)[0]["first"]
        == was[0]["first"]
    )
    (told,) = pool.run(checkpoint_work.exported, 1, [str(folder), str(tmp_path / "out")])
    assert told[0] == 0, told[2]
    work.write_folder(model, FAMILIES["qwen3-tied"], seed=1)
    assert "not those that were written" in pool.run(checkpoint_work.refused_restore, 2, config, folder)[0]
    shutil.rmtree(model)
    (told,) = pool.run(checkpoint_work.exported, 1, [str(folder), str(tmp_path / "again")])
    assert told[0] == 1, told


def test_without_room_for_a_copy_training_stands_until_it_is_written(pool: RankPool, tmp_path: Path) -> None:
    config = config_of("alone")
    config["megatron"]["memory_checkpoint_share"] = 0.0
    (was,) = pool.run(checkpoint_work.checkpoint_without_room, 1, config, STEPS, tmp_path)
    assert "would leave less than" in was["health"]["trouble"]
    (came,) = pool.run(checkpoint_work.restore_in_turn, 1, config, STEPS, [tmp_path])
    assert came["states"][-1] == was["state"]


def test_what_is_not_whole_or_not_what_was_written_is_refused(
    pool: RankPool, from_tp2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert (
        "no whole checkpoint" in pool.run(checkpoint_work.refused_restore, 1, config_of("alone"), tmp_path)[0]
    )
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
        (other / "actor.json").write_text(json.dumps(sealed({**book, **changes})))
        assert sentence in pool.run(checkpoint_work.refused_restore, 1, config_of("alone"), other)[0]


def test_another_back_ends_or_models_checkpoint_is_refused_with_what_to_do(
    pool: RankPool, from_tp2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    beginnings, config = write_beginnings(tmp_path), config_of("alone")
    deeper = {**config, "model": {**config["model"], "layers": 3}}
    for folder, job, sentence, hint in (
        (
            beginnings["torch"],
            config,
            "is one of plain torch, not of Megatron's ranks",
            "gyre run JOB_FILE --from",
        ),
        (
            beginnings["fsdp"],
            config,
            "is one of FSDP2's ranks, not of Megatron's ranks",
            "gyre run JOB_FILE --from",
        ),
        (
            from_tp2[0],
            deeper,
            "is of another model: num_hidden_layers is 2 instead of 3",
            "what it began with",
        ),
    ):
        (said,) = pool.run(checkpoint_work.refused_restore, 1, job, folder)
        assert sentence in said
        assert hint in said
