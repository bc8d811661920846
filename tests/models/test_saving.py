"""A folder that is written says what its tensors are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gyre.models.saving import config_for, save_model_folder
from gyre.models.tensor_names import EMBEDDING, HEAD


def tensors(dtype: torch.dtype, *, tied: bool = True) -> dict[str, torch.Tensor]:
    found = {EMBEDDING: torch.zeros(4, 2, dtype=dtype), "step": torch.zeros(64, dtype=torch.int64)}
    return found if tied else found | {HEAD: torch.zeros(4, 2, dtype=dtype)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        ({"torch_dtype": "bfloat16", "dtype": "float16"}, {"torch_dtype": "float32", "dtype": "float32"}),
        ({}, {"torch_dtype": "float32"}),
    ],
)
def test_the_dtype_is_that_of_the_tensors(config: dict[str, str], expected: dict[str, str]) -> None:
    assert config_for(config, tensors(torch.float32)) == expected | {"tie_word_embeddings": True}


def test_the_output_layer_is_tied_where_there_is_none() -> None:
    assert not config_for({"tie_word_embeddings": True}, tensors(torch.float32, tied=False))[
        "tie_word_embeddings"
    ]
    assert config_for({"tie_word_embeddings": False}, tensors(torch.float32))["tie_word_embeddings"]


def test_what_belongs_to_the_model_goes_along(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "README.md"):
        (beside / name).write_text(name)
    (beside / "additional_chat_templates").mkdir()
    (beside / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    save_model_folder(tmp_path / "out", {"dtype": "float32"}, tensors(torch.bfloat16), beside=beside)
    held = {path.name for path in (tmp_path / "out").iterdir()}
    assert held == {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json",
        "additional_chat_templates",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
