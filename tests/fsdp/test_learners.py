"""FSDP2's actor, critic, reference and reward model over models that only transformers knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.fsdp.learner_work import (
    CONFIG,
    PPO,
    checkpoint_and_go_on,
    conversations,
    from_pretrained,
    of_folder,
    publishes,
    reference_logprobs,
    refused,
    restore_and_go_on,
    said_by_engine,
    said_by_folder,
    save_reward_model,
    scores,
    trains_an_adapter,
)
from tests.fsdp.work import VOCAB
from tests.megatron.work import random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = [
    [random_groups(0, 3), [], random_groups(3, 1), random_groups(4, 5)],
    [random_groups(9, 1), random_groups(10, 4)],
    [random_groups(14, 4)],
]
"""Micro-batches of unequal size, some of which leave a rank without a group."""


@pytest.mark.parametrize("name", ["FsdpActor", "FsdpCritic"])
def test_a_restored_learner_goes_on_bit_by_bit(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    config = of_folder(folder_of("qwen3_moe"), **(PPO if name == "FsdpCritic" else {}))
    was = pool.run(checkpoint_and_go_on, 2, name, config, STEPS, tmp_path)
    came = pool.run(restore_and_go_on, 2, name, config, STEPS, tmp_path)
    assert was[0]["at"]["digest"] != was[0]["after"]["digest"]
    for mine, theirs in zip(came, was, strict=True):
        assert mine == {key: theirs[key] for key in mine}
    assert was[0]["first"] == was[1]["first"], "metrics are over all ranks"
    (other,) = pool.run(restore_and_go_on, 1, name, config, STEPS, tmp_path)
    assert other["at"] == was[0]["at"]
    for found, wanted in zip(other["metrics"], was[0]["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_what_an_actor_writes_is_a_folder_of_transformers(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("mixtral")
    told = pool.run(publishes, 2, of_folder(folder), STEPS[:1], tmp_path / "out")[0]
    assert told["warm"] == {"steps": 0}
    assert told["config"]["model_type"] == "mixtral"
    (before,), (after,) = folder.glob("*.safetensors"), (tmp_path / "out").glob("*.safetensors")
    first, trained = load_file(before), load_file(after)
    assert sorted(told["names"]) == sorted(first) == sorted(trained)
    assert all(trained[name].shape == one.shape for name, one in first.items())
    assert any(not np.array_equal(trained[name], one) for name, one in first.items())
    (missed,) = pool.run(from_pretrained, 1, tmp_path / "out")
    assert not missed


def test_the_small_decoder_is_trained_too(pool: RankPool, tmp_path: Path) -> None:
    told = pool.run(publishes, 2, CONFIG, STEPS[:1], tmp_path / "out")[0]
    assert told["warm"]["steps"] == 4
    assert told["config"]["model_type"] == "qwen3"


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3"])
def test_a_reference_has_transformers_log_probs(
    pool: RankPool, folder_of: Callable[[str], Path], kind: str
) -> None:
    ((found, wanted),) = pool.run(reference_logprobs, 1, of_folder(folder_of(kind)), conversations(VOCAB))
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("kind", "ranks"), [("gemma3_text", 2), ("qwen3", 1)])
def test_an_adapter_is_served_and_saved_as_it_was_trained_and_judged_by_the_model_beside_it(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, kind: str, ranks: int
) -> None:
    """No second model: the reference of the KL term is the actor's own, without its adapter."""
    folder, groups = folder_of(kind), conversations(VOCAB)
    config = of_folder(
        folder,
        lora={"rank": 4, "alpha": 16.0},
        sampling={"n": 4, "max_new_tokens": 12, "temperature": 1.0},
        loss={"kl_loss_coef": 0.1},
    )
    told = pool.run(trains_an_adapter, ranks, config, STEPS, groups, tmp_path)[0]
    assert all(metrics["kl"] > 0 for metrics in told["metrics"][1:])
    (base,), (saved,) = (pool.run(said_by_folder, 1, path, groups) for path in (folder, tmp_path / "saved"))
    (version,) = (tmp_path / "version").glob("*.safetensors")
    assert all(".lora_" in name for name in load_file(version))
    (engine,) = pool.run(said_by_engine, 1, folder, tmp_path / "version", groups)
    said = np.concatenate(told["said"])
    assert np.abs(said - np.concatenate(base)).max() > 1e-3, "nothing was learnt"
    for found, wanted in ((saved, said), (engine, said), (told["reference"], np.concatenate(base))):
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_a_reward_is_transformers_number_at_the_last_token(pool: RankPool, tmp_path: Path, kind: str) -> None:
    pool.run(save_reward_model, 1, kind, tmp_path / "rm", 1)
    config = {**CONFIG, "reward_model": {"path": str(tmp_path / "rm")}}
    ((found, wanted),) = pool.run(scores, 1, config, conversations(VOCAB))
    assert np.std(wanted) > 1e-3
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_a_reward_model_of_two_labels_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_reward_model, 1, "mistral", tmp_path / "rm", 2)
    config = {**CONFIG, "reward_model": {"path": str(tmp_path / "rm")}}
    (said,) = pool.run(refused, 1, "FsdpRewardModel", config)
    assert "has no tensor score.weight for one label" in said


def test_a_tensor_that_the_model_has_not_is_refused(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(folder_of("mistral"), tmp_path / "m", extra=np.zeros(3, np.float32))
    for said in pool.run(refused, 2, "FsdpActor", of_folder(folder)):
        assert "holds 1 tensors that its model does not have, model.extra among them" in said


def test_a_tied_head_that_is_another_is_refused(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where transformers alone knows that this kind is tied."""
    folder = copied(folder_of("gemma3_text"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    (said,) = pool.run(refused, 1, "FsdpActor", of_folder(folder))
    assert "the model ties its embeddings, and lm_head.weight is not model.embed_tokens.weight" in said


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_all_ranks(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, kind: str, number: float
) -> None:
    """The last rank holds the row, and says which tensor it is in."""
    folder = copied(folder_of(kind), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, 3] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    first, last = pool.run(refused, 2, "FsdpActor", of_folder(folder))
    assert "another rank cannot take the weights" in first
    assert "NaN or infinity is in model.embed_tokens.weight." in last


def test_a_model_that_transformers_cannot_build_is_refused(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(folder_of("mistral"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["num_key_value_heads"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    (said,) = pool.run(refused, 1, "FsdpActor", of_folder(folder))
    assert "transformers cannot build this mistral: ZeroDivisionError" in said


def test_a_folder_without_weights_is_refused_where_only_transformers_could_draw_them(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folder_of("mistral") / "config.json").read_text())
    (said,) = pool.run(refused, 1, "FsdpActor", of_folder(tmp_path))
    assert "of this kind of model they are not drawn from the seed" in said


def copied(folder: Path, to: Path, **extra: np.ndarray) -> Path:
    """The folder once more, with tensors that its model does not have."""
    to.mkdir()
    (to / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors") | {f"model.{name}": one for name, one in extra.items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to
