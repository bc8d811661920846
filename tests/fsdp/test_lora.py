"""An adapter on FSDP2: its losses, gradients and steps are those of the same by hand; the model beside it stays as it
is; what is written of it is the adapter alone, in PEFT's layout, or the model with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.config.sections import LoraSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.models.adapters import model_print
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.workloads.fsdp.lora import targets_of
from tests.fsdp.export_work import exported, opened
from tests.fsdp.lora_work import (
    LORA,
    LORA_CONFIG,
    load_adapter,
    opened_by_peft,
    refused_adapters,
    restore_adapter_and_step,
    take_adapter_steps,
    take_plain_adapter_steps,
    train_and_save_adapter,
)
from tests.fsdp.test_backend import relative
from tests.fsdp.test_checkpoints import same
from tests.fsdp.work import CONFIG, random_rows
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = [random_rows(9, seed=1), random_rows(8, seed=2)]
FolderOf = Callable[[str], Path]
OF_A_LAYER = {
    "qwen3": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gemma3_text": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj"},
}
"""The linear layers; experts are one tensor."""


def own_name(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".weight")


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [
        ("qwen3", 1, {}),
        ("qwen3", 2, {"recompute": False}),
        ("qwen3", 4, {"whole_gradient": True}),
        ("gemma3_text", 2, {}),
        ("mixtral", 2, {}),
    ],
)
def test_the_adapter_has_the_steps_of_the_same_by_hand(
    pool: RankPool, folder_of: FolderOf, kind: str, ranks: int, settings: dict[str, Any]
) -> None:
    folder = folder_of(kind)
    told = pool.run(take_adapter_steps, ranks, folder, {**LORA_CONFIG, "fsdp": settings}, STEPS)
    first = told[0]
    assert {own_name(name).split(".")[-2] for name in first["first"]} == OF_A_LAYER[kind]
    for name, one in first["first"].items():
        assert name.startswith("base_model.model.model.layers.")
        if name.endswith("lora_B.weight"):
            assert not one.any(), "training begins with the model itself"
        else:
            assert 0.5 < np.abs(one).max() * np.sqrt(one.shape[1]) <= 1.0
    (plain,) = pool.run(take_plain_adapter_steps, 1, folder, first["first"], STEPS)
    assert all(one["losses"] == first["losses"] and one["norms"] == first["norms"] for one in told)
    assert relative(first["losses"], plain["losses"]) < 1e-5
    assert relative(first["norms"], plain["norms"]) < 1e-4
    assert {own_name(name) for name in plain["gradients"]} == first["gradients"].keys()
    for what in ("lora_A", "lora_B"):
        mine, theirs = (
            np.concatenate([one[key].ravel() for key in sorted(one) if what in key])
            for one in (first["gradients"], plain["gradients"])
        )
        assert np.linalg.norm(theirs) > 0
        assert relative(mine, theirs) < 1e-5, what
    assert relative(first["said"], plain["said"]) < 1e-4
    assert all(one["frozen"] and one["trained dtypes"] == ["torch.float32"] for one in told)
    assert first["with a gradient"] == len(first["first"])


def test_off_it_is_the_model_and_merged_it_is_the_adapter(
    pool: RankPool, folder_of: FolderOf, tmp_path: Path
) -> None:
    folder = folder_of("qwen3")
    told = pool.run(take_adapter_steps, 2, folder, LORA_CONFIG, STEPS)[0]
    (before,) = pool.run(opened, 1, folder, STEPS[0])
    assert relative(told["base said"], before["said"]) < 1e-6
    assert relative(told["said"], before["said"]) > 1e-3, "it was trained"
    assert np.array_equal(told["said again"], told["said"])
    weights = SafetensorsFolder(folder).tensors()
    assert told["merged"].keys() == weights.keys()
    changed = {name for name, one in weights.items() if not np.array_equal(told["merged"][name], one.numpy())}
    assert changed == {f"{own_name(name).rpartition('.')[0]}.weight" for name in told["weights"]}


def test_in_bfloat16_the_adapter_is_kept_in_float32(pool: RankPool, folder_of: FolderOf) -> None:
    config = {**LORA_CONFIG, "fsdp": {"dtype": "bfloat16"}}
    told = pool.run(take_adapter_steps, 2, folder_of("qwen3"), config, STEPS)
    plain = pool.run(take_adapter_steps, 2, folder_of("qwen3"), LORA_CONFIG, STEPS)
    assert told[0]["frozen"]
    assert (told[0]["frozen dtypes"], told[0]["trained dtypes"]) == (["torch.bfloat16"], ["torch.float32"])
    assert relative(told[0]["losses"], plain[0]["losses"]) < 0.05
    moved = [one for name, one in told[0]["weights"].items() if name.endswith("lora_B.weight")]
    assert all(np.abs(one).max() > 0 for one in moved)


@pytest.fixture(scope="module")
def saved(
    pool: RankPool, folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, list[dict[str, Any]]]:
    """A model's folder, a checkpoint of an adapter beside it, and what two ranks said of it."""
    root = tmp_path_factory.mktemp("adapter")
    shutil.copytree(folder_of("qwen3"), root / "model")
    told = pool.run(train_and_save_adapter, 2, root / "model", LORA_CONFIG, root / "checkpoint", STEPS)
    return root / "model", root / "checkpoint", told


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_goes_on_from_the_adapter_alone(
    pool: RankPool, saved: tuple[Path, Path, list[dict[str, Any]]], ranks: int
) -> None:
    model, path, wanted = saved
    held = {key for file in path.glob("rank_*.json") for key, *_ in json.loads(file.read_text())["parts"]}
    assert held == {"random", *map(own_name, wanted[0]["weights"])}
    told = pool.run(restore_adapter_and_step, ranks, model, {**LORA_CONFIG, "seed": 99}, path, STEPS)
    assert same(told[0]["at"], wanted[0]["at"])
    if ranks == 2:
        assert same(told[0]["after"], wanted[0]["after"])
    assert relative(told[0]["norm"], wanted[0]["norm"]) < 1e-5


def test_another_adapters_checkpoint_is_refused_and_changes_nothing(
    pool: RankPool, saved: tuple[Path, Path, list[dict[str, Any]]], folder_of: FolderOf, tmp_path: Path
) -> None:
    model, path, _ = saved
    other = tmp_path / "other"
    shutil.copytree(model, other)
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.25
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    pool.run(train_and_save_adapter, 2, other, CONFIG, tmp_path / "whole", STEPS)
    for folder, config, checkpoint, sentence in (
        (other, LORA_CONFIG, path, "was trained beside the weights of another model"),
        (
            model,
            {**CONFIG, "lora": {**LORA, "alpha": 12.0}},
            path,
            "config.lora.alpha is 6.0 there, 12.0 here",
        ),
        (model, {**CONFIG, "lora": {**LORA, "rank": 2}}, path, "config.lora.rank is 4 there, 2 here"),
        (
            model,
            {**CONFIG, "lora": {**LORA, "target_modules": ["q_proj"]}},
            path,
            "config.lora.target_modules",
        ),
        (model, CONFIG, path, "it is of an adapter, and config.lora is not given"),
        (other, LORA_CONFIG, tmp_path / "whole", "it is of a whole model, and config.lora is given"),
    ):
        for said, untouched in pool.run(refused_adapters, 2, folder, config, checkpoint):
            assert sentence in said, said
            assert untouched, sentence


def test_it_is_exported_merged_and_bare(
    pool: RankPool, saved: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, path, told = saved
    merged, bare = tmp_path / "merged", tmp_path / "bare"
    (done,) = pool.run(exported, 1, [str(path), str(merged)])
    assert done[0] == 0, done[2]
    (found,) = pool.run(opened, 1, merged, STEPS[0])
    assert found["problems"] == {}
    assert found["tied"]
    assert relative(found["said"], told[0]["said"]) < 1e-5
    (done,) = pool.run(exported, 1, [str(path), str(bare), "--adapter"])
    assert done[0] == 0, done[2]
    assert sorted(file.name for file in bare.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((bare / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6.0)
    assert config["base_model_name_or_path"] == str(model)
    assert config["gyre_model_print"] == model_print(model), "so that it is taken beside no other"
    (found,) = pool.run(opened_by_peft, 1, model, bare, STEPS[0])
    assert found["left out"] == []
    assert relative(found["said"], told[0]["said"]) < 1e-5
    said = pool.run(load_adapter, 2, model, {**LORA_CONFIG, "seed": 5}, bare, STEPS[0])[0]
    assert np.array_equal(said, told[0]["said"])


MIXTURES = {"qwen3_moe": "layers.1.mlp.gate_proj", "deepseek_v3": "layers.0.mlp.gate_proj"}


@pytest.mark.parametrize("kind", MIXTURES)
def test_parts_that_peft_would_take_for_experts_are_not_exported_by_themselves(
    pool: RankPool, folder_of: FolderOf, tmp_path: Path, kind: str
) -> None:
    """PEFT opened such a folder, said in a warning that keys were missing, and left the parts out."""
    model, checkpoint = folder_of(kind), tmp_path / "checkpoint"
    pool.run(train_and_save_adapter, 2, model, LORA_CONFIG, checkpoint, STEPS)
    (done,) = pool.run(exported, 1, [str(checkpoint), str(tmp_path / "bare"), "--adapter"])
    assert done[0] != 0
    assert MIXTURES[kind] in done[2]
    assert "for parts of the model's experts" in " ".join(done[2].split())
    (done,) = pool.run(exported, 1, [str(checkpoint), str(tmp_path / "merged")])
    assert done[0] == 0, done[2]
    attention = {**LORA_CONFIG, "lora": {**LORA_CONFIG["lora"], "target_modules": ["o_proj"]}}
    told = pool.run(train_and_save_adapter, 2, model, attention, tmp_path / "attention", STEPS)
    (done,) = pool.run(exported, 1, [str(tmp_path / "attention"), str(tmp_path / "bare"), "--adapter"])
    assert done[0] == 0, done[2]
    (found,) = pool.run(opened_by_peft, 1, model, tmp_path / "bare", STEPS[0])
    assert found["left out"] == []
    assert relative(found["said"], told[0]["said"]) < 1e-4


def test_a_base_that_is_gone_or_another_is_no_base_to_merge_with(
    pool: RankPool, folder_of: FolderOf, tmp_path: Path
) -> None:
    model, path, out = tmp_path / "model", tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(folder_of("qwen3"), model)
    pool.run(train_and_save_adapter, 1, model, LORA_CONFIG, path, STEPS)
    weights = SafetensorsFolder(model).tensors()
    from safetensors.torch import save_file

    changed = {name: one.clone() for name, one in weights.items()}
    changed["model.layers.1.mlp.up_proj.weight"][0, 0] += 0.5
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    (told,) = pool.run(exported, 1, [str(path), str(out)])
    assert (told[0], "beside other weights than" in told[2]) == (1, True), told
    shutil.rmtree(model)
    (told,) = pool.run(exported, 1, [str(path), str(out)])
    assert (told[0], "whose weights are not there" in told[2]) == (2, True), told
    assert not out.exists()


LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("all-linear", LAYERS),
        (["q_proj"], [LAYERS[0], LAYERS[2]]),
        (["mlp.up_proj", LAYERS[2]], LAYERS[1:]),
    ],
)
def test_layers_are_named_as_peft_does(asked: Any, found: list[str]) -> None:
    assert targets_of(LAYERS, LoraSettings(rank=2, target_modules=asked)) == found


def test_a_name_of_no_layer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no linear layer 'q_projj'.*q_proj"):
        targets_of(LAYERS, LoraSettings(rank=2, target_modules=["q_projj"]))
    with pytest.raises(ConfigError, match="no linear layer 'proj'"):
        targets_of(LAYERS, LoraSettings(rank=2, target_modules=["proj"]))
    for wrong in ({"rank": 0}, {"rank": 4, "dropout": 0.1}, {"alpha": 2.0}, {"rank": 4, "alpha": 0.0}):
        with pytest.raises(ConfigError, match=r"config\.lora\."):
            WorkloadSettings.read({"lora": wrong})
