"""Reward models from folders: transformers' number for a whole conversation, in plain torch and in Megatron-core."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.errors import ConfigError, UserCodeError
from gyre.models.errors import ModelFolderError
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.frozen import take_rewards
from gyre.workloads.torch.reward_model import TorchRewardModel
from tests.megatron import work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import config_of
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow


def write_reward_model(folder: Path, family: str) -> Path:
    """As `AutoModelForSequenceClassification` saves it: no output layer, and a score, all in one file."""
    work.write_folder(folder, FAMILIES[family])
    tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tensors.pop("lm_head.weight", None)
    hidden = FAMILIES[family]["hidden_size"]
    tensors["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def conversations() -> list[Group]:
    """Samples of several lengths, one that says nothing, and one longer than a pass."""
    draw = np.random.default_rng(3)

    def tokens(count: int) -> Any:
        return draw.integers(0, 90, count).astype(np.int32)

    return [
        Group(
            at,
            tokens(4 + at),
            samples=[
                Sample(
                    tokens(count), np.zeros(count, np.float32), (VersionRun(0, 0, count),) if count else ()
                )
                for count in (5, 0, 17 + 30 * at)
            ],
        )
        for at in range(2)
    ]


def by_transformers(folder: Path, groups: list[Group]) -> list[float]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    ).eval()
    found = []
    with torch.no_grad():
        for group in groups:
            for sample in group.samples:
                tokens = np.concatenate([group.prompt_ids, sample.token_ids]).astype(np.int64)
                found.append(float(model(torch.from_numpy(tokens)[None]).logits[0, 0]))
    return found


def torch_model(folder: Path) -> TorchRewardModel:
    model = TorchRewardModel()
    model.context = WorkloadContext("j", "reward", 0, 1, config={"reward_model": {"path": str(folder)}})
    model.setup()
    return model


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen2", "llama-bias"])
def test_a_sample_s_reward_is_the_number_at_its_last_token(
    pool: RankPool, tmp_path: Path, family: str
) -> None:
    folder, groups = write_reward_model(tmp_path / "rm", family), conversations()
    expected = by_transformers(folder, groups)
    assert np.std(expected) > 0.1
    plain = torch_model(folder).score(copy.deepcopy(groups))
    np.testing.assert_allclose(
        [sample.reward for group in plain for sample in group.samples], expected, atol=1e-5, rtol=0
    )
    config = config_of("tp2", reward_model={"path": str(folder)})
    (found,) = pool.run(work.scores, 1, config, groups)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_what_is_no_reward_model_and_tokens_that_it_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"lacks 1 tensors, score\.weight among them"):
        torch_model(work.write_folder(tmp_path / "policy", FAMILIES["qwen3"]))
    folder = write_reward_model(tmp_path / "rm", "qwen3")
    groups = conversations()
    groups[0].samples[0].token_ids[2] = 93
    with pytest.raises(ConfigError, match="group 0 has token 93; the reward model has 93 tokens"):
        torch_model(folder).score(groups)
    with pytest.raises(UserCodeError, match="gave nan for a sample of group 1, which is no reward"):
        take_rewards(groups, [1.0, 0.5, -2.0, 0.0, float("nan"), 1.0])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="not drawn from a seed"):
        torch_model(folder)
    reward = TorchRewardModel()
    reward.context = WorkloadContext("j", "reward", 0, 1, config={})
    with pytest.raises(ConfigError, match=r"config\.reward_model\.path is missing"):
        reward.setup()
