"""The decoder in Hugging Face's names. The small one is a Qwen3, and any engine that serves Qwen3 can serve it; one of
a folder may be a Qwen2 or a Llama.

Invariant *lossless*: `from_names(to_names(state)) == state`, bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gyre.engines.embedded.architecture import Architecture
from gyre.workloads.torch.model import ModelConfig


def config_from(architecture: Architecture) -> ModelConfig:
    """The decoder of a folder's shape."""
    a = architecture
    return ModelConfig(
        vocab=a.vocab,
        layers=a.layers,
        hidden=a.hidden,
        heads=a.heads,
        kv_heads=a.kv_heads,
        mlp=a.mlp,
        max_positions=a.max_positions,
        rope_theta=a.rope.theta,
        norm_eps=a.norm_eps,
        tied_embeddings=a.tied,
        head_size=a.head_dim,
        qk_norm=a.qk_norm,
        qkv_bias=a.qkv_bias,
        out_bias=a.out_bias,
        mlp_bias=a.mlp_bias,
        frequencies=tuple(a.rope.frequencies(a.head_dim)),
    )


def _block(config: ModelConfig) -> dict[str, str]:
    """Those of a block's parameters that are one tensor there, too."""
    found = {"attention_norm.weight": "input_layernorm.weight"}
    if config.qk_norm:
        found["attention.q_norm.weight"] = "self_attn.q_norm.weight"
        found["attention.k_norm.weight"] = "self_attn.k_norm.weight"
    found["attention.out.weight"] = "self_attn.o_proj.weight"
    if config.out_bias:
        found["attention.out.bias"] = "self_attn.o_proj.bias"
    found["mlp_norm.weight"] = "post_attention_layernorm.weight"
    found["down.weight"] = "mlp.down_proj.weight"
    if config.mlp_bias:
        found["down.bias"] = "mlp.down_proj.bias"
    return found


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


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
        for name, other in _block(config).items():
            named[theirs + other] = state[mine + name]
        for kind in _kinds(config.qkv_bias):
            parts = torch.split(state[f"{mine}attention.qkv.{kind}"], [width, kv_width, kv_width])
            for letter, part in zip("qkv", parts, strict=True):
                named[f"{theirs}self_attn.{letter}_proj.{kind}"] = part
        for kind in _kinds(config.mlp_bias):
            gate, up = state[f"{mine}gate_up.{kind}"].chunk(2)
            named[f"{theirs}mlp.gate_proj.{kind}"], named[f"{theirs}mlp.up_proj.{kind}"] = gate, up
    return named


def from_names(named: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_names`. Raises KeyError for a tensor that is missing."""
    state = {"embed.weight": named["model.embed_tokens.weight"], "norm.weight": named["model.norm.weight"]}
    if not config.tied_embeddings:
        state["head.weight"] = named["lm_head.weight"]
    for layer in range(config.layers):
        mine, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, other in _block(config).items():
            state[mine + name] = named[theirs + other]
        for kind in _kinds(config.qkv_bias):
            state[f"{mine}attention.qkv.{kind}"] = torch.cat(
                [named[f"{theirs}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            )
        for kind in _kinds(config.mlp_bias):
            state[f"{mine}gate_up.{kind}"] = torch.cat(
                [named[f"{theirs}mlp.{half}_proj.{kind}"] for half in ("gate", "up")]
            )
    return state
