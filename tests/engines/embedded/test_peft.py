"""Adapters that PEFT writes, and what they say in PEFT's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gyre.engines.embedded.adapters import adapted, layers_of, make_adaptable, read_adapter
from gyre.models.adapters import _KEYS, AdapterLimits, read_adapter_config
from gyre.models.errors import ModelFolderError
from tests.engines.embedded.tiny_transformers import write_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and accelerate's, of torch

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


def written(folder: Path, out: Path, **given: Any) -> torch.Tensor:
    """What PEFT's model says of the prompt with an adapter of drawn numbers, which lies in `out` then."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
        said: torch.Tensor = model(input_ids=PROMPT).logits
    model.save_pretrained(out)
    return said


def said_here(folder: Path, adapter: Path) -> torch.Tensor:
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    make_adaptable(causal)
    found = read_adapter(adapter, layers_of(causal), AdapterLimits(16), torch.float32)
    with torch.no_grad(), adapted(causal, found):
        said: torch.Tensor = causal(input_ids=PROMPT).logits
    return said


@pytest.mark.parametrize(
    "given",
    [
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, "lora_alpha": 3.5, "target_modules": ["up_proj", "o_proj"], "lora_dropout": 0.1},
        {"r": 2, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
    ],
)
def test_an_adapter_says_here_what_it_says_in_peft(tmp_path: Path, given: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    wanted = written(folder, tmp_path / "adapter", **given)
    torch.testing.assert_close(said_here(folder, tmp_path / "adapter"), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"v_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"v_proj": 2}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
    ],
)
def test_one_that_says_something_else_is_refused_by_the_key_that_makes_it(
    tmp_path: Path, given: dict[str, Any], key: str
) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    written(folder, tmp_path / "adapter", r=4, target_modules=["q_proj", "v_proj"], **given)
    with pytest.raises(ModelFolderError, match=key):
        said_here(folder, tmp_path / "adapter")


def test_every_key_that_peft_has_is_known() -> None:
    """A new one is looked at: does it change what an adapter says?"""
    from peft import LoraConfig

    assert set(LoraConfig().to_dict()) <= set(_KEYS)


def test_the_example_of_peft_s_own_file_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    written(folder, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    config = read_adapter_config(tmp_path / "adapter")
    assert (config.rank, config.alpha, config.layers, config.model_print) == (4, 8.0, ("q_proj",), "")
