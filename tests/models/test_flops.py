"""The model's operations, beside those that torch counts while transformers' own model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gyre.models.architecture import Architecture, config_of
from gyre.models.flops import FAMILIES, flops_of

WIDTH = 12
DENSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": 8},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "qwen2_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_and_a_backward_pass_have_the_operations_that_torch_counts(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**DENSE, **MODELS[family]}
    config = AutoConfig.for_model(
        family, **given, attn_implementation="eager", experts_implementation="eager"
    )
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, given["vocab_size"], (1, WIDTH))
    found = flops_of({"model_type": family, **given})
    assert found is not None
    everything = np.full(WIDTH, WIDTH - 1)  # eager attention computes every key, masked ones too
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).logits.sum()
    assert forward.get_total_flops() == found.forward(everything, WIDTH)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total == found.training(everything, WIDTH)


def test_a_query_attends_to_what_is_before_it_and_to_no_more_than_a_window() -> None:
    shape = {"model_type": "mistral", **DENSE}
    whole, windowed = flops_of(shape), flops_of({**shape, "sliding_window": 4})
    assert whole is not None
    assert windowed is not None
    positions = np.arange(10)
    one = whole.forward(np.arange(0), 0) or 4 * 4 * 16  # operations of one key in one layer
    without = 10 * whole.token
    assert whole.forward(positions, 0) == without + 3 * one * 55
    assert windowed.forward(positions, 0) == without + 3 * one * (1 + 2 + 3 + 7 * 4)


def test_a_prompt_that_is_computed_once_is_counted_once() -> None:
    found = flops_of({"model_type": "llama", **DENSE})
    assert found is not None
    prompt, answer = np.arange(8), np.arange(8, 12)
    apart = 2 * found.training(np.concatenate([prompt, answer]), 4)
    once = found.training(np.concatenate([prompt, answer, answer]), 8)
    assert apart - once == found.training(prompt, 0)


def test_frozen_matrices_have_no_gradient_of_their_own() -> None:
    found = flops_of({"model_type": "llama", **DENSE})
    assert found is not None
    positions = np.arange(6)
    saved = found.training(positions, 3) - found.training(positions, 3, frozen=True)
    assert saved == 6 * found.token + 3 * found.prediction


def test_a_value_head_predicts_one_number_and_what_is_not_known_is_not_said() -> None:
    shape = Architecture.qwen3(vocab=64, layers=2, hidden=32, heads=4, kv_heads=2, mlp=48, max_positions=32)
    config = config_of(shape, eos_id=1)
    policy, critic = flops_of(config), flops_of(config, values=True)
    assert policy is not None
    assert critic is not None
    assert policy.prediction == 64 * critic.prediction == 2 * 32 * 64
    for other in ({"model_type": "mamba"}, {"model_type": "qwen3"}, {}, {**config, "hidden_size": "wide"}):
        assert flops_of(other) is None
