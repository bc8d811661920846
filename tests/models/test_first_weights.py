"""Folders in Hugging Face's layout: sharded or not, and what is wrong with them told before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.models.architecture import architecture_of
from gyre.models.errors import ModelFolderError
from gyre.models.first_weights import SeededWeights, first_weights
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.tensor_names import EMBEDDING
from tests.engines.embedded.tiny import CONFIGS, write_checkpoint

CPU = torch.device("cpu")
NORM = "model.layers.1.self_attn.q_norm.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def written(folder: Path, **changes: object) -> Path:
    """A Qwen3 in two shards."""
    return write_checkpoint(folder, {**CONFIGS["qwen3"], **changes}, seed=0, shards=2)


def opened(folder: Path, *, head: bool = True, **changes: object) -> SafetensorsFolder | SeededWeights:
    architecture = architecture_of({**CONFIGS["qwen3"], **changes}, "config.json")
    return first_weights(folder, architecture, 0, CPU, head=head)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Its tensors in one file without an index, after `change`."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_are_those_that_the_index_names(tmp_path: Path) -> None:
    folder = written(tmp_path / "m")
    whole = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
    save_file(
        {name: torch.zeros_like(one) for name, one in whole.items()}, folder / "consolidated.safetensors"
    )
    source = opened(folder)
    assert all(torch.equal(source(name), tensor) for name, tensor in whole.items())
    with pytest.raises(ModelFolderError, match=r"no tensor model\.other"):
        source("model.other")


def test_a_tied_model_may_hold_its_head_and_a_critic_s_may_lack_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "m")
    with pytest.raises(ModelFolderError, match=r"tie_word_embeddings, and lm_head\.weight is not"):
        opened(folder, tie_word_embeddings=True)
    assert isinstance(opened(folder, tie_word_embeddings=True, head=False), SafetensorsFolder)
    changed(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    assert isinstance(opened(folder, tie_word_embeddings=True), SafetensorsFolder)
    changed(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert isinstance(opened(folder, head=False), SafetensorsFolder)
    with pytest.raises(ModelFolderError, match=r"lacks 1 tensors, lm_head\.weight"):
        opened(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(NORM), rf"lacks 1 tensors, {NORM} among them\."),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "holds 1 unknown tensors, extra"),
        (lambda tensors: tensors.update({NORM: torch.zeros(3)}), r"q_norm\.weight is F32 \(3,\), .*\(16,\)"),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(16, dtype=torch.int8)}),
            r"q_norm\.weight is I8 \(16,\)",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(16).to(torch.float8_e4m3fn)}),
            r"q_norm\.weight is F8_E4M3",
        ),
    ],
)
def test_tensors_that_are_not_the_model_s_are_told(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], sentence: str
) -> None:
    folder = written(tmp_path / "m")
    changed(folder, change)
    with pytest.raises(ModelFolderError, match=sentence):
        opened(folder)


def lose_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def leave_pointers(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.write_text(POINTER)


def cut_short(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])


def break_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}))


def save_by_pickle(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lose_a_shard, "lacks 1 of the 2 files of its weights, .*safetensors among them"),
        (leave_pointers, "cannot be read as safetensors.*Git LFS"),
        (cut_short, "cannot be read as safetensors"),
        (break_the_index, "is not an index of shards"),
        (save_by_pickle, r"holds weights as pytorch_model\.bin, and none as safetensors"),
    ],
)
def test_files_that_are_not_there_or_broken_are_told_and_nothing_is_drawn_instead(
    tmp_path: Path, harm: Callable[[Path], None], sentence: str
) -> None:
    folder = written(tmp_path / "m")
    harm(folder)
    with pytest.raises(ModelFolderError, match=sentence):
        opened(folder)


def test_weights_are_drawn_where_there_are_none_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    assert isinstance(opened(tmp_path), SeededWeights)
