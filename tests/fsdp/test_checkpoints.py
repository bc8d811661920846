"""Checkpoints of FSDP2's ranks: written beside the training, loaded by any number of ranks, refused whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.workloads.gang.state_files import sealed
from tests.fsdp.test_backend import STEPS, relative
from tests.fsdp.work import (
    CONFIG,
    given_up_save,
    refused_restores,
    restore_and_step,
    save_where_one_cannot,
    step_save_step,
)
from tests.other_checkpoints import write_beginnings
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[one], wanted[one]) for one in wanted)


@pytest.fixture(scope="module")
def saved(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("saved") / "actor"
    return path, pool.run(step_save_step, 2, folder_of("qwen3_moe"), CONFIG, path, STEPS)


def test_what_is_written_is_the_state_when_the_write_began(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, told = saved
    assert not any(one["early"] for one in told)
    assert not same(told[0]["at"], told[0]["after"])
    assert (path / "actor.json").exists()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_goes_on_from_there(
    pool: RankPool, folder_of: Callable[[str], Path], saved: tuple[Path, list[dict[str, Any]]], ranks: int
) -> None:
    path, wanted = saved
    told = pool.run(restore_and_step, ranks, folder_of("qwen3_moe"), {**CONFIG, "seed": 99}, path, STEPS)
    assert all(one["metadata"] == {"step": 1, "rank_was": [0, "text"], "digest": "a digest"} for one in told)
    assert same(told[0]["at"], wanted[0]["at"])
    for mine, theirs in zip(told, wanted, strict=False):
        assert mine["drawn"] == theirs["drawn"], "a rank's random numbers go on"
    if ranks == 2:
        assert told[0]["norm"] == wanted[0]["norm"]
        assert same(told[0]["after"], wanted[0]["after"])
    assert relative(told[0]["norm"], wanted[0]["norm"]) < 1e-5
    assert all(relative(told[0]["after"][name], one) < 1e-5 for name, one in wanted[0]["after"].items())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def altered(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As somebody would write it who forgets the checksum."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BREAKS: dict[str, Callable[[Path], None]] = {
    "no last file": lambda path: (path / "actor.json").unlink(),
    "a flipped bit": lambda path: flip(path / "rank_00001.state"),
    "a lost rank": lambda path: (path / "rank_00001.state").unlink(),
    "a cut file": lambda path: (path / "rank_00000.state").write_bytes(b"short"),
    "no record": lambda path: (path / "rank_00000.json").unlink(),
    "another record": lambda path: altered(path / "rank_00000.json", lambda one: one["parts"].pop()),
    "another number of ranks": lambda path: altered(path / "actor.json", lambda one: one.update(ranks=1)),
    "another format": lambda path: altered(path / "actor.json", lambda one: one.update(format=2)),
}


def test_a_broken_checkpoint_is_refused_by_all_and_changes_nothing(
    pool: RankPool,
    folder_of: Callable[[str], Path],
    saved: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    paths = [tmp_path / "never there"]
    for name, damage in BREAKS.items():
        shutil.copytree(saved[0], tmp_path / name)
        damage(tmp_path / name)
        paths.append(tmp_path / name)
    told = pool.run(refused_restores, 2, folder_of("qwen3_moe"), CONFIG, paths)
    for number, path in enumerate(paths):
        for rank in range(2):
            said, untouched = told[rank][number]
            assert said, f"{path.name}, on rank {rank}"
            assert untouched, f"{path.name}, on rank {rank}"


def test_another_models_checkpoint_is_refused(
    pool: RankPool, folder_of: Callable[[str], Path], saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """By what it says of its model, and by its tensors where it says nothing."""
    own = json.loads((folder_of("qwen3") / "config.json").read_text())
    paths, sentences = [saved[0]], ["the model"]
    for changes, sentence in (
        ({"model_type": "mistral"}, "model_type is mistral instead of qwen3"),
        ({"num_hidden_layers": 9}, "num_hidden_layers is 9 instead of 2"),
    ):
        path = shutil.copytree(saved[0], tmp_path / sentence)
        content = json.loads((path / "actor.json").read_text())
        content["metadata"]["model"] = {"config": {**own, **changes}}
        (path / "actor.json").write_text(json.dumps(sealed(content)))
        paths.append(path)
        sentences.append(sentence)
    for of_rank in pool.run(refused_restores, 2, folder_of("qwen3"), CONFIG, paths):
        for (said, untouched), sentence in zip(of_rank, sentences, strict=True):
            assert sentence in said
            assert "Give the job what it began with" in said
            assert untouched


def test_another_back_ends_checkpoint_is_refused_by_all_ranks(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    beginnings = write_beginnings(tmp_path)
    told = pool.run(
        refused_restores, 2, folder_of("qwen3"), CONFIG, [beginnings["torch"], beginnings["megatron"]]
    )
    for of_torch, of_megatron in told:
        assert of_torch[1]
        assert of_megatron[1]
        assert "is one of plain torch, not of FSDP2's ranks. A new job begins with its weights" in of_torch[0]
        assert "is one of Megatron's ranks, not of FSDP2's ranks" in of_megatron[0]


def test_a_save_gives_up_the_one_before_it(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    told = pool.run(given_up_save, 2, folder_of("qwen3"), CONFIG, first, second)
    assert all(
        one == {"written": True, "first": [], "second": {"save": 2, "step": 1, "digest": None}}
        for one in told
    )


def test_a_rank_that_cannot_write_fails_the_save_of_all(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    told = pool.run(save_where_one_cannot, 2, folder_of("qwen3"), CONFIG, tmp_path / "full")
    assert "by another rank" in told[0]
    assert "No space left" in told[1]
    assert not (tmp_path / "full" / "actor.json").exists()
