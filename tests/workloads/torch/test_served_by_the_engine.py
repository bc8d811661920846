"""The small decoder, served as a Qwen3 by the embedded engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gyre.models.tensor_names import from_names, to_names
from gyre.weights.version.manifest import TENSOR_FILE, WeightManifest, WeightMismatch
from gyre.weights.version.model_folder import ModelFolder, config_bytes, fingerprint, list_model_folder
from gyre.workloads.learner.padded import TokenRow, pad_rows
from gyre.workloads.torch.actor import TorchActor
from tests.engines.embedded.tiny import Model, ask, run
from tests.workloads.padded_logprobs import token_logprobs
from tests.workloads.torch_workloads import CONFIG, bind


@pytest.fixture
def actor() -> TorchActor:
    made: TorchActor = bind(TorchActor(), {**CONFIG, "model": {**CONFIG["model"], "max_positions": 64}})
    return made


def exported(actor: TorchActor, folder: Path) -> ModelFolder:
    config, described, buffer = actor.export_model(version=3)
    manifest = WeightManifest.from_dict(described)
    folder.mkdir(parents=True)
    (folder / TENSOR_FILE).write_bytes(buffer)
    (folder / "config.json").write_bytes(config_bytes(config))
    return list_model_folder(folder, version=manifest.version, step=manifest.step, tensors=manifest.tensors)


def test_names_there_and_back_are_the_same_bits(actor: TorchActor) -> None:
    state = dict(actor.backend.model.named_parameters())
    back = from_names(to_names(state, actor.backend.model.architecture), actor.backend.model.architecture)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_engines_log_probs_are_the_trainers(actor: TorchActor, tmp_path: Path) -> None:
    exported(actor, tmp_path / "v3")
    core = Model(tmp_path / "v3").core()
    prompts = [[1, 5, 9, 16], [1, 4], [1, 12, 13, 7, 3, 3]]
    asked = [
        ask(prompt, new=24, seed=index, rid=f"r{index}", temperature=0.7)
        for index, prompt in enumerate(prompts)
    ]
    run(core, *asked)
    for prompt, one in zip(prompts, asked, strict=True):
        rows = [TokenRow(np.array(prompt, np.int32), np.array(one.tokens, np.int32))]
        with torch.no_grad():
            ours, _ = token_logprobs(actor.backend.model, pad_rows(rows), 0.7)
        assert np.allclose(ours[0].numpy(), np.array(one.logprobs, np.float32), atol=1e-5, rtol=0)


def test_a_folder_is_whole_and_verified(actor: TorchActor, tmp_path: Path) -> None:
    folder = exported(actor, tmp_path / "v3")
    assert folder == ModelFolder.read(tmp_path / "v3")
    folder.verify()
    assert fingerprint(folder.path) != fingerprint(tmp_path) == "unset"
    path = folder.path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightMismatch, match=r"model\.safetensors"):
        folder.verify()
    with pytest.raises(WeightMismatch, match="no published weights"):
        ModelFolder.read(tmp_path / "nowhere")
