"""A checkpoint of any layout as a folder that others load: the same weights, or none."""

from __future__ import annotations

import contextlib
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gyre.errors import ConfigError
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.saving import save_model_folder
from gyre.workloads.gang.state_files import sealed
from tests.export_memory import most_bytes
from tests.fsdp.export_work import opened
from tests.fsdp.work import random_rows
from tests.megatron import learner_work, work
from tests.megatron.checkpoints import checkpoint_work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = [[random_groups(0, 4)]]
ROWS = random_rows(5, seed=6)


def checkpoint_of(pool: RankPool, folder: Path, layout: str, model: Path | None) -> dict[str, Any]:
    """What the first rank said of the checkpoint that it wrote; training did not go on after it."""
    folder.mkdir()
    config = config_of(layout)
    if model is not None:
        config["megatron"]["model_path"] = str(model)
    written = partial(checkpoint_work.train_and_checkpoint, background=False)
    found: dict[str, Any] = pool.run(written, LAYOUTS[layout][0], config, STEPS, folder)[0]
    return found


@pytest.fixture(scope="module")
def trained(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A checkpoint over four ranks, the folder that it began with, and the weights that it came to."""
    root = tmp_path_factory.mktemp("trained")
    model = work.write_folder(root / "model", FAMILIES["qwen3-tied"])
    (model / "tokenizer.json").write_text("{}")
    found = checkpoint_of(pool, root / "checkpoint", "tp2-pp2", model)
    return root / "checkpoint", model, found["after"]["weights"]


def test_the_trained_weights_come_out_with_the_tokenizer(
    pool: RankPool, trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint, model, weights = trained
    out = tmp_path / "out"
    (told,) = pool.run(checkpoint_work.exported, 1, [str(checkpoint), str(out), "--json"])
    assert told[0] == 0, told[2]
    assert json.loads(told[1]) | {"size_bytes": 0} == {
        "step": 1,
        "tensors": len(weights),
        "size_bytes": 0,
        "dtype": "float32",
    }
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(np.array_equal(saved[name].numpy(), weights[name]) for name in weights)
    begun = SafetensorsFolder(model)
    assert not all(torch.equal(saved[name], begun(name)) for name in saved), "it was trained"
    said = json.loads((out / "config.json").read_text())
    assert said == FAMILIES["qwen3-tied"] | {"torch_dtype": "float32"}
    assert (out / "tokenizer.json").read_text() == "{}"
    (again,) = pool.run(checkpoint_work.exported, 1, [str(checkpoint), str(out)])
    assert (again[0], "exists already" in again[2]) == (2, True)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3-tied", True), ("llama", False)])
def test_transformers_says_of_it_what_the_trained_model_says(
    pool: RankPool, tmp_path: Path, kind: str, tied: bool
) -> None:
    model = work.write_folder(tmp_path / "model", FAMILIES[kind])
    (tmp_path / "checkpoint").mkdir()
    config = {**config_of("tp2-pp2"), "model_path": str(model)}
    said = pool.run(checkpoint_work.checkpoint_and_say, 4, config, STEPS, tmp_path / "checkpoint", ROWS)[0]
    pool.run(checkpoint_work.exported, 1, [str(tmp_path / "checkpoint"), str(tmp_path / "out")])
    (found,) = pool.run(opened, 1, tmp_path / "out", ROWS)
    (before,) = pool.run(opened, 1, model, ROWS)
    np.testing.assert_allclose(found["said"], said, atol=1e-4, rtol=0)
    assert np.abs(before["said"] - said).max() > 1e-3, "it was trained"
    assert (found["problems"], found["tied"], found["generated"]) == ({}, tied, 7)


def test_so_does_the_small_decoder_in_another_dtype(pool: RankPool, tmp_path: Path) -> None:
    weights = checkpoint_of(pool, tmp_path / "checkpoint", "dp2", None)["after"]["weights"]
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    (told,) = pool.run(checkpoint_work.exported, 1, arguments)
    assert told[0] == 0, told[2]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == weights.keys()
    for name, expected in weights.items():
        assert torch.equal(saved[name], torch.from_numpy(expected).bfloat16()), name


@pytest.mark.slow
def test_the_weights_of_one_file_are_in_memory(pool: RankPool, tmp_path: Path) -> None:
    """Of ranks that shared the layers, so that parameters are put together."""
    (tmp_path / "checkpoint").mkdir()
    config = config_of("tp2")
    config["model"] = {**config["model"], "layers": 6, "hidden": 512, "heads": 8, "kv_heads": 8, "mlp": 2048}
    pool.run(checkpoint_work.checkpoint_untrained, 2, config, tmp_path / "checkpoint")
    most = most_bytes(
        "megatron", tmp_path / "checkpoint", tmp_path / "out", file_bytes=8 << 20, dtype="float32"
    )
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 96 << 20
    assert len(files) > 5
    assert most < 48 << 20


def test_what_is_no_policy_s_whole_checkpoint_is_refused(
    pool: RankPool, trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint, _, _ = trained
    book = json.loads((checkpoint / "actor.json").read_text())
    for name, changes, sentence in (
        ("critic", {"model": None}, "is not of a policy"),
        ("changed", {"digest": "0" * 32}, "are not those that were written"),
    ):
        other = tmp_path / name
        other.mkdir()
        for file in checkpoint.glob("rank_*"):
            (other / file.name).symlink_to(file)
        (other / "actor.json").write_text(json.dumps(sealed({**book, **changes})))
        (told,) = pool.run(checkpoint_work.exported, 1, [str(other), str(tmp_path / "out")])
        assert (told[0], sentence in told[2]) == (1, True), told
    (told,) = pool.run(checkpoint_work.exported, 1, [str(tmp_path), str(tmp_path / "out")])
    assert "is no checkpoint: it has neither rank_00000.pt nor actor.json" in told[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "critic"]


class Bait:
    """Unpickled, it makes a file."""

    def __init__(self, bitten: Path) -> None:
        self.bitten = bitten

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.bitten,)


def test_a_pickle_is_not_read_unless_its_writer_is_trusted(
    pool: RankPool, trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Megatron's own format holds a pickle, and a stranger's checkpoint says itself that it is in it."""
    checkpoint, _, _ = trained
    book = json.loads((checkpoint / "actor.json").read_text())
    theirs, bitten = tmp_path / "theirs", tmp_path / "bitten"
    (theirs / "state").mkdir(parents=True)
    (theirs / "actor.json").write_text(json.dumps(sealed({**book, "format": 1})))
    (theirs / "state" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (theirs / "state" / ".metadata").write_bytes(pickle.dumps(Bait(bitten)))
    torch.save({}, theirs / "state" / "common.pt")
    arguments = [str(theirs), str(tmp_path / "out")]
    (told,) = pool.run(checkpoint_work.exported, 1, arguments)
    assert (told[0], "give --trust" in told[2]) == (2, True), told
    assert not bitten.exists()
    with contextlib.suppress(AssertionError):  # it is no checkpoint, whatever else it is
        pool.run(checkpoint_work.exported, 1, [*arguments, "--trust"])
    assert bitten.exists(), "the bait is none, and the test proves nothing"


def test_a_critic_s_checkpoint_says_that_it_has_no_policy(pool: RankPool, tmp_path: Path) -> None:
    config = config_of("alone", loss={"adv_estimator": "gae"})
    pool.run(learner_work.checkpoint_and_go_on, 1, config, STEPS, tmp_path)
    (book,) = [json.loads(path.read_text()) for path in tmp_path.rglob("actor.json")]
    assert book["model"] is None


def test_large_weights_are_several_files(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((n, 4), float(n)) for n in (3, 1, 9, 2)}
    save_model_folder(tmp_path / "out", {"model_type": "x"}, tensors, shard_bytes=80)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    source = SafetensorsFolder(tmp_path / "out")
    assert all(torch.equal(source(name), tensor) for name, tensor in tensors.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 15 * 4 * 4
    with pytest.raises(ConfigError, match="exists already"):
        save_model_folder(tmp_path / "out", {}, tensors)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        save_model_folder(tmp_path / "file" / "out", {}, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
