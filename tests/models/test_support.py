"""The table of who takes which model: shown as it is, and true of what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from gyre.api.cli.models import models
from gyre.graph.backends import back_ends
from gyre.models.architecture import FAMILIES, read_architecture
from gyre.models.support import SUPPORT, describe, is_hub_name, markdown_table
from gyre.models.transformers_models import causal_types
from gyre.rollouts.engines import engines
from tests.engines.embedded.tiny import CONFIGS, write_checkpoint

ROOT = Path(__file__).parents[2]
BACK_ENDS, ENGINES = back_ends(), engines()
TAKERS = {who.name: who for who in (*BACK_ENDS, *ENGINES)}


def test_a_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    assert markdown_table(list(TAKERS.values())) in page, "print it by gyre.models.support.markdown_table()"


def test_every_family_that_is_read_has_a_row() -> None:
    for family in FAMILIES:
        (row,) = [row for row in SUPPORT if row.config == f'model_type: "{family}"']
        assert all(row.takes(who) for who in TAKERS.values())


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2, Qwen2.5 (dense)": ("qwen2", {}),
    "Qwen3 (dense)": ("qwen3", {}),
    "Llama 2, 3 and models of its shape": ("llama", {}),
    "output layer tied to the embedding, or its own": ("qwen3", {"tie_word_embeddings": True}),
    "grouped-query attention": ("qwen3", {"num_key_value_heads": 1}),
    "rotary positions: default, linear, llama3": (
        "qwen3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "rotary positions: yarn, dynamic, longrope, mrope": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    ),
    "biases in attention alone": ("qwen3-bias", {}),
    "biases in attention and MLP": ("llama-bias", {}),
    "a sliding window that is active": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ),
    "mixtures of experts": ("qwen3", {"model_type": "qwen3_moe", "num_experts": 4}),
    "quantized weights": ("qwen3", {"quantization_config": {"quant_method": "fp8"}}),
    "images and sound": ("qwen3", {"vision_config": {"depth": 1}}),
    "every other kind that was tried (Gemma, Mistral, Phi, …)": ("qwen3", {"model_type": "mistral"}),
}


@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: row.name)
def test_a_row_is_what_the_code_does(row: Any, tmp_path: Path) -> None:
    kind, changes = ROWS[row.name]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[kind], **changes}))
    if row.takes(TAKERS["fsdp"]) and not row.takes(
        TAKERS["torch"]
    ):  # of what only transformers knows, weights must be there
        save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    report = describe(tmp_path, BACK_ENDS, ENGINES)
    for name in (*(who.name for who in BACK_ENDS), "embedded"):
        assert row.takes(TAKERS[name]) == (not report.refused.get(name)), (name, report.refused)
    if report.architecture is not None:
        for who in ENGINES:
            assert row.takes(who) == (not who.unfit(read_architecture(tmp_path))), who.name


def test_a_folder_is_described(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "qwen3-bias", shards=2)
    told = describe(folder, BACK_ENDS, ENGINES).as_dict()
    assert (told["model_type"], told["tied"], told["context"]) == ("qwen3", True, 1024)
    assert told["weights"]["files"] == 2
    assert told["parameters"] * 4 == told["weights"]["size_bytes"]
    assert told["trains"]["torch"] == {"takes": True, "reason": ""}
    assert "attention_bias" in told["trains"]["megatron"]["reason"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("models/Qwen3-0.6B", False),
        ("./a/b", False),
        ("/a/b", False),
        ("a/b/c", False),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_path(text: str, expected: bool) -> None:
    assert is_hub_name(text) is expected


def test_the_verb_prints_the_table_and_a_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama-bias")
    run = CliRunner().invoke
    assert all(row.name in run(models, []).output for row in SUPPORT)
    assert [row["model"] for row in json.loads(run(models, ["--json"]).output)["rows"]] == [
        row.name for row in SUPPORT
    ]
    shown = run(models, [str(folder)]).output
    assert "torch: yes" in shown
    assert "sglang: no: mlp_bias is true" in shown
    assert json.loads(run(models, [str(folder), "--json"]).output)["serves"]["sglang"]["takes"] is False


def test_the_table_of_transformers_is_read_as_it_is() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_types() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mistral", "quantization_config": {"bits": 4}}, "quantization_config is given"),
        ({"model_type": "gemma3", "vision_config": {"depth": 1}}, "models of images or sound"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "a model with an encoder is not trained"),
        ({"model_type": "vit"}, "is no causal language model of the installed transformers"),
        ({"model_type": "mistral"}, "holds no weights, and of this kind of model"),
    ],
)
def test_what_fsdp_does_not_train_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], **changes}))
    assert said in describe(tmp_path, BACK_ENDS, ENGINES).refused["fsdp"]


def test_a_head_that_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "model_type": "mistral"}))
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "lacks lm_head.weight" in describe(tmp_path, BACK_ENDS, ENGINES).refused["fsdp"]


def test_the_table_needs_no_torch() -> None:
    code = "import sys, gyre.models.support, gyre.api.checks.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
