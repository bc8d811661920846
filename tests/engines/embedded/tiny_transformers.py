"""Tiny random folders of models that transformers computes, and what it says of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gyre.engines.embedded.core import EngineCore, Limits
from gyre.engines.embedded.transformers_model import TransformersModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PHI3 = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _SHAPE,
    "llama": _SHAPE | {"tie_word_embeddings": True},
    "mistral": _SHAPE | {"sliding_window": 8},
    "phi3": _PHI3,
    "olmo2": _PHI3,
    "gemma3_text": _SHAPE | _WINDOWS | {"query_pre_attn_scalar": 16},
    "mixtral": _SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _SHAPE | _EXPERTS,
    "gpt_oss": _SHAPE | _WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    # Scores that are capped, which sdpa does not compute.
    "gemma2": _SHAPE | {"sliding_window": 8, "query_pre_attn_scalar": 16},
    # Layers that keep a state.
    "qwen3_next": _SHAPE
    | _EXPERTS
    | {
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": _SHAPE | {"layer_types": ["conv", "full_attention", "conv"]},
    # Layers that attend to a window of another name, and a temperature that grows beyond some tokens.
    "gpt_neo": _PHI3
    | {
        "num_hidden_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "window_size": 8,
    },
    "llama4_text": _SHAPE
    | {
        "num_hidden_layers": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    # Positions that it takes from a mask of two dimensions.
    "bloom": {
        "vocab_size": 96,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def write_folder(
    folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """The folder of a model of CONFIGS, as `save_pretrained` writes it. Logits are spread by about 1."""
    config = CONFIG_MAPPING[name](**(CONFIGS[name] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in causal.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    causal.to(dtype).save_pretrained(folder)
    return folder


@dataclass
class Model:
    """A folder under the engine, and what transformers says without a cache."""

    path: Path

    def __post_init__(self) -> None:
        self.model = TransformersModel(self.path)
        self.weights = self.model.load(self.path, torch.float32)

    def core(self, max_running: int = 8, prefill_tokens: int = 16) -> EngineCore:
        limits = Limits(max_running, 100_000, 512, prefill_tokens)
        return EngineCore(self.model, self.weights, limits, weight_version="1")

    def load(self, folder: Path) -> Any:
        return self.model.load(folder, torch.float32)


def whole_logprobs(weights: Any, tokens: Sequence[int]) -> Tensor:
    """Float32 `[len(tokens) - 1, vocab]`: what a forward over all of them without a cache says of each next token."""
    with torch.no_grad():
        logits = weights(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)
