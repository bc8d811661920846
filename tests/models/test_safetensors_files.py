"""Which files of a folder are its model: one reading, or a refusal that names the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.models.architecture import read_architecture
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import INDEX, WHOLE, weight_files
from gyre.models.safetensors_folder import SafetensorsFolder
from tests.engines.embedded.tiny import write_checkpoint

NORM = "model.norm.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def names(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "whole")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "shards", shards=2)


def remap(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_one_set_of_files_is_the_model(whole: Path, shards: Path) -> None:
    assert names(whole) == [WHOLE]
    assert names(shards) == [FIRST, SECOND]
    save_file({"tok_embeddings.weight": torch.zeros(2)}, whole / "consolidated.safetensors")
    save_file(load_file(shards / FIRST), shards / "consolidated.safetensors")
    assert names(whole) == [WHOLE], "another form of it is beside it"
    assert names(shards) == [FIRST, SECOND], "the index says which"


def test_two_files_with_one_tensor_are_refused_by_their_names(whole: Path) -> None:
    save_file(load_file(whole / WHOLE), whole / "model.fp16.safetensors")
    with pytest.raises(ModelFolderError, match=r"model\.fp16\.safetensors and model\.safetensors both hold"):
        weight_files(whole)


def test_an_index_beside_a_whole_model_is_refused(shards: Path) -> None:
    save_file(load_file(shards / FIRST), shards / WHOLE)
    with pytest.raises(ModelFolderError, match=r"two models: model\.safetensors, and model-00001"):
        weight_files(shards)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda held: held.update({NORM: FIRST if held[NORM] == SECOND else SECOND}), f"{NORM} is in model-0000"),
        (lambda held: held.pop(NORM), "in no file by the index"),
        (lambda held: held.update({"more.weight": FIRST}), "none of them by the files"),
        (lambda held: held.update({"more.weight": "gone.safetensors"}), "lacks 1 of the 3 files"),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_its_files_is_refused(shards: Path, change, sentence: str) -> None:
    remap(shards, change)
    with pytest.raises(ModelFolderError, match=sentence):
        weight_files(shards)


def test_shards_without_an_index_are_all_there_or_refused(shards: Path) -> None:
    (shards / INDEX).unlink()
    assert names(shards) == [FIRST, SECOND]
    (shards / SECOND).unlink()
    with pytest.raises(ModelFolderError, match=f"lacks {SECOND}"):
        weight_files(shards)


def test_an_adapter_is_not_a_model(whole: Path) -> None:
    (whole / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="adapter"):
        weight_files(whole)


def test_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tied", "qwen2")
    tensors = load_file(folder / WHOLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / WHOLE)
    SafetensorsFolder(folder).require(read_architecture(folder))
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, folder / WHOLE)
    with pytest.raises(ModelFolderError, match="tie_word_embeddings"):
        SafetensorsFolder(folder).require(read_architecture(folder))
    SafetensorsFolder(folder).require(read_architecture(folder), head=None)
