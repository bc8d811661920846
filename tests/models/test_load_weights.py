"""Safetensors are loaded whole or not at all, and stay what they were when the file changes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.models.architecture import read_architecture
from gyre.models.decoder import load_weights
from gyre.models.errors import ModelFolderError
from gyre.models.finite import is_finite
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.workloads.learner.trained_model import own_parameters
from tests.engines.embedded.tiny import CONFIGS, write_checkpoint


def load(folder):
    return load_weights(folder, read_architecture(folder), torch.float32)


def test_shards_give_what_one_file_gives(tmp_path):
    one = load(write_checkpoint(tmp_path / "one", "qwen3-bias"))
    three = load(write_checkpoint(tmp_path / "three", "qwen3-bias", shards=3))
    assert torch.equal(one.embed, three.embed)
    assert torch.equal(one.layers[1].qkv, three.layers[1].qkv)
    assert torch.equal(one.layers[1].qk_norm, three.layers[1].qk_norm)


def test_tied_weights_are_one_tensor_and_untied_two(tmp_path):
    tied = load(write_checkpoint(tmp_path / "tied", "qwen2"))
    untied = load(write_checkpoint(tmp_path / "untied", "qwen3"))
    assert tied.head is tied.embed
    assert untied.head is not untied.embed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks 1 tensors, model\.layers\.1\.mlp\.up_proj",
        ),
        (
            lambda t: t.update(extra=torch.zeros(1)),
            "holds 1 unknown tensors, extra",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model\.norm\.weight is .*\(31,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}), r"is I32 \(32,\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_tensors_name(tmp_path, change, sentence):
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=sentence):
        load(folder)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_with_the_tensors_name(tmp_path, number):
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][7, 7] = number
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"NaN or infinity is in blocks\.1\.down\.weight\."):
        load(folder)
    with pytest.raises(ModelFolderError, match=r"is in model\.layers\.1\.mlp\.down_proj\.weight\."):
        own_parameters(SafetensorsFolder(folder), read_architecture(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_what_is_finite(dtype):
    assert is_finite(torch.zeros(0, 3, dtype=dtype))
    assert is_finite(torch.ones(2, 3, dtype=dtype).T)
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        assert is_finite(torch.tensor([largest, -largest], dtype=dtype))  # whose sum is not
        assert not is_finite(torch.tensor([[1.0, torch.nan], [2.0, 3.0]], dtype=dtype))


def test_files_that_are_no_checkpoint_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    with pytest.raises(ModelFolderError, match=r"holds no safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 9)
    with pytest.raises(ModelFolderError, match="cannot be read as safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="not an index"):
        load(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFolderError, match="cannot be read as safetensors"):
        load(folder)


def test_weights_are_no_view_of_the_file(tmp_path):
    folder = write_checkpoint(tmp_path)
    weights = load(folder)
    before = weights.embed.clone(), weights.layers[0].down.clone(), weights.norm.clone()
    size = (folder / "model.safetensors").stat().st_size
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(b"\xff" * size)
    after = weights.embed, weights.layers[0].down, weights.norm
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
