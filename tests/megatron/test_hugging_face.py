"""Models from folders in Hugging Face's layout: the same function as transformers', and the same bits out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.data.prepare import prepare
from tests.data.small import write_lines, write_tokenizer
from tests.engines.embedded.tiny import CONFIGS
from tests.megatron import work
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

# A vocabulary that is no multiple of anything: its padding must have no probability, and must not come out again.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**CONFIGS["qwen3"], "vocab_size": 93},
    "qwen3-tied": {**CONFIGS["qwen3"], "tie_word_embeddings": True, "vocab_size": 93},
    "qwen2": {**CONFIGS["qwen2"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14},
    "llama": CONFIGS["llama"],
    "llama-bias": {**CONFIGS["llama-bias"], "num_key_value_heads": 2},
}
SEQUENCES = [
    [int(token) for token in np.random.default_rng(length).integers(0, 93, length)]
    for length in (70, 2, 9, 33)
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A folder, and what transformers makes of the sequences: log-probs of every token but the first."""
    transformers = pytest.importorskip("transformers")
    folder = work.write_folder(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = []
    for sequence in SEQUENCES:
        with torch.no_grad():
            logits = theirs(torch.tensor([sequence])).logits[0, :-1].float()
        every = torch.log_softmax(logits, dim=-1)
        parts.append(every.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0])
    return request.param, folder, torch.cat(parts).numpy()


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("layout", ["alone", "tp2-sequence", "pp2", "tp2-pp2"])
def test_log_probs_are_transformers_and_weights_come_out_as_they_went_in(
    pool: RankPool, model: tuple[str, Path, Any], layout: str
) -> None:
    name, folder, expected = model
    config = config_of(layout)
    config["megatron"]["model_path"] = str(folder)
    results = pool.run(work.forward_and_back, LAYOUTS[layout][0], config, SEQUENCES)
    assert results[0]["passes"] == 3, "the long sequence alone, two packed, the last one for want of room"
    np.testing.assert_allclose(results[-1]["logprobs"], expected, atol=1e-4, rtol=0)
    weights = results[0]["weights"]
    written = {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
    assert weights.keys() == written.keys()
    for key, tensor in written.items():
        assert np.array_equal(weights[key], tensor.numpy()), f"{name}: {key}"


def test_seeded_weights_do_not_depend_on_the_layout(pool: RankPool, tmp_path: Path) -> None:
    folder = work.write_folder(tmp_path / "m", FAMILIES["qwen3"])
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    found = []
    for layout in ("alone", "tp2-pp2"):
        config = config_of(layout)
        config["megatron"]["model_path"] = str(folder)
        found.append(pool.run(work.forward_and_back, LAYOUTS[layout][0], config, SEQUENCES)[0]["weights"])
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert 0.01 < found[0]["model.layers.0.mlp.gate_proj.weight"].std() < 0.03


def test_the_reference_gives_transformers_log_probs(pool: RankPool, model: tuple[str, Path, Any]) -> None:
    _, folder, expected = model
    config = {"sampling": {"temperature": 1.0}, "megatron": {"model_path": str(folder), "tensor_parallel": 2}}
    (found,) = pool.run(work.reference_logprobs, 1, config, SEQUENCES)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_a_reference_computes_a_groups_prompt_once(pool: RankPool, tmp_path: Path) -> None:
    folder = work.write_folder(tmp_path / "m", FAMILIES["qwen3-tied"])
    groups = random_groups(0, 3, n=8, prompt_tokens=20)
    config = {"sampling": {"temperature": 1.0}, "megatron": {"model_path": str(folder)}}
    ((once, width),) = pool.run(work.reference_of_groups, 1, config, groups)
    config["megatron"]["prompts_once"] = False
    ((each, wider),) = pool.run(work.reference_of_groups, 1, config, groups)
    assert wider - width == 3 * 7 * 19
    np.testing.assert_allclose(once, each, atol=1e-5, rtol=0)


def test_a_model_is_saved_as_it_was_loaded(pool: RankPool, tmp_path: Path) -> None:
    folder = work.write_folder(tmp_path / "m", FAMILIES["qwen3-tied"])
    config = config_of("tp2-pp2")
    config["megatron"]["model_path"] = str(folder)
    pool.run(work.save_folder, 4, config, tmp_path / "saved")
    written = {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in written.items())
    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert said == FAMILIES["qwen3-tied"] | {"torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "a bias in attention's output but not in the MLP"),
        ({"num_key_value_heads": 1}, "tensor_parallel: 2 does not divide the model's num_key_value_heads"),
        ({"num_hidden_layers": 3}, "pipeline_parallel: 2 does not divide the model's num_hidden_layers"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    pool: RankPool, changes: dict[str, Any], sentence: str
) -> None:
    (refusal,) = pool.run(work.refusal_of, 1, {**CONFIGS["llama"], **changes})
    assert sentence in refusal


def test_prompts_of_another_tokenizer_are_refused(pool: RankPool, tmp_path: Path) -> None:
    folder = work.write_folder(tmp_path / "m", FAMILIES["qwen3-tied"])
    tokenizer = write_tokenizer(tmp_path / "other")
    rows = write_lines(tmp_path / "rows.jsonl", [{"question": "Why 1 plus 1?", "answer": "#### 2"}])
    prepare(rows, tmp_path / "data", tokenizer)
    config = config_of("alone", data={"path": str(tmp_path / "data")})
    config["megatron"]["model_path"] = str(folder)
    (refusal,) = pool.run(work.refused_setup, 1, config)
    assert "the prompts hold token" in refusal
    assert "has 93 tokens" in refusal


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_weights_that_are_not_finite_are_refused_by_all_ranks(
    pool: RankPool, tmp_path: Path, layout: str, number: float
) -> None:
    """The last rank holds the number, and says which tensor it is in; the set-up may be tried again."""
    folder = work.write_folder(tmp_path / "m", FAMILIES["qwen3"])
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][-1, 3] = number
            save_file(tensors, file)
    config = config_of(layout, model_path=str(folder))
    for _ in range(2):
        first, last = pool.run(work.refused_setup, 2, config)
        assert "another rank cannot take the weights" in first
        assert "NaN or infinity is in lm_head.weight." in last
