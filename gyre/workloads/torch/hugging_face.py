"""The small decoder in Hugging Face's names: it is a Qwen3, and any engine that serves Qwen3 can serve it.

Invariant *lossless*: `from_names(to_names(state)) == state`, bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gyre.workloads.torch.model import ModelConfig

_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "down.weight": "mlp.down_proj.weight",
}


def config_of(config: ModelConfig, *, eos_id: int) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.layers,
        "initializer_range": 0.02,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def to_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The decoder's parameters by Hugging Face's names; q, k, v and gate, up are views of the joined ones."""
    named: dict[str, Tensor] = {"model.embed_tokens.weight": state["embed.weight"]}
    named["model.norm.weight"] = state["norm.weight"]
    if not config.tied_embeddings:
        named["lm_head.weight"] = state["head.weight"]
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for layer in range(config.layers):
        mine, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, other in _BLOCK.items():
            named[theirs + other] = state[mine + name]
        parts = torch.split(state[mine + "attention.qkv.weight"], [width, kv_width, kv_width])
        for letter, part in zip("qkv", parts, strict=True):
            named[f"{theirs}self_attn.{letter}_proj.weight"] = part
        gate, up = state[mine + "gate_up.weight"].chunk(2)
        named[theirs + "mlp.gate_proj.weight"], named[theirs + "mlp.up_proj.weight"] = gate, up
    return named


def from_names(named: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_names`. Raises KeyError for a tensor that is missing."""
    state = {"embed.weight": named["model.embed_tokens.weight"], "norm.weight": named["model.norm.weight"]}
    if not config.tied_embeddings:
        state["head.weight"] = named["lm_head.weight"]
    for layer in range(config.layers):
        mine, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, other in _BLOCK.items():
            state[mine + name] = named[theirs + other]
        state[mine + "attention.qkv.weight"] = torch.cat(
            [named[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        )
        state[mine + "gate_up.weight"] = torch.cat(
            [named[theirs + "mlp.gate_proj.weight"], named[theirs + "mlp.up_proj.weight"]]
        )
    return state
