"""The decoder's forward pass, for training and for serving: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Invariant *one function*: a trainer and an engine run `hidden_states` over the same `DecoderWeights`, so that log-probs
of the two agree up to the rounding of differently shaped products. They differ in attention alone, which each passes
in: over whole sequences with a gradient (`gyre.models.modules`), or one token a row over a cache
(`gyre.engines.embedded.batch_step`).

Queries, keys, values and rotary positions are float32 whatever the weights are: torch's CPU attention is faster so than
in bfloat16.

Sources: RoFormer (arXiv 2104.09864), GQA (arXiv 2305.13245), SwiGLU (arXiv 2002.05202), Qwen3 (arXiv 2505.09388).
This module must not know about caches, batches, sampling or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.models.architecture import Architecture
from gyre.models.errors import ModelFolderError
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.tensor_names import parameter_parts

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attention(layer, q, k, v)` gives `[..., heads * d]`; `q` is `[..., heads, d]`, `k` and `v` `[..., kv_heads, d]`."""

_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Matrices are `[out, in]`; `qk_norm` is float32 `[heads + kv_heads, head_dim]`, a row for each head."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything that is learned. `head` is `embed` where they are tied."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], architecture: Architecture) -> DecoderWeights:
        """The decoder's parameters by its own names (`gyre.models.tensor_names`), whose memory it shares."""
        layers = tuple(_layer(parameters, number, architecture) for number in range(architecture.layers))
        embed = parameters["embed.weight"]
        return cls(embed, layers, parameters["norm.weight"], parameters.get("head.weight", embed))


def load_weights(folder: Path, architecture: Architecture, dtype: torch.dtype) -> DecoderWeights:
    """The weights in `folder`, in memory of their own: the folder may be written anew while they are used.

    Raises ModelFolderError where it holds no weights, another model's, or some that are not finite.
    """
    source = SafetensorsFolder(folder)
    if not source:
        raise ModelFolderError(
            f"{folder} holds no safetensors.", hint="Save the model with save_pretrained, or check the path."
        )
    source.require(architecture)

    def joined(name: str, parts: tuple[str, ...]) -> Tensor:
        wanted = torch.float32 if name.endswith(_HEAD_NORMS) else dtype
        return torch.cat([source(part).to(wanted) for part in parts])  # cat copies, of one tensor too

    fused = {name: joined(name, parts) for name, parts in parameter_parts(architecture).items()}
    refuse_not_finite([name for name, tensor in fused.items() if not is_finite(tensor)])
    return DecoderWeights.of(fused, architecture)


def hidden_states(
    architecture: Architecture,
    weights: DecoderWeights,
    tokens: Tensor,
    rotary: tuple[Tensor, Tensor],
    attention: Attention,
) -> Tensor:
    """Hidden states before the last norm, `[..., hidden]`, of int64 `tokens` `[...]`.

    `rotary` are the cosines and signed sines of the tokens' positions (`rotary_table`), broadcastable to
    `[..., heads, d]`.
    """
    a = architecture
    cos, sin = rotary
    x = F.embedding(tokens, weights.embed)
    for layer, w in enumerate(weights.layers):
        h = F.rms_norm(x, (a.hidden,), w.attention_norm, a.norm_eps)
        heads = F.linear(h, w.qkv, w.qkv_bias).float()
        heads = heads.view(*x.shape[:-1], a.heads + 2 * a.kv_heads, a.head_dim)
        qk, v = torch.split(heads, [a.heads + a.kv_heads, a.kv_heads], dim=-2)
        if w.qk_norm is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, a.norm_eps) * w.qk_norm
        first, second = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, torch.cat((second, first), dim=-1), sin)
        q, k = torch.split(qk, [a.heads, a.kv_heads], dim=-2)
        mixed = attention(layer, q, k, v).to(x.dtype)
        x = x + F.linear(mixed, w.out, w.out_bias)
        h = F.rms_norm(x, (a.hidden,), w.mlp_norm, a.norm_eps)
        gate, up = F.linear(h, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w.down, w.down_bias)
    return x


def last_norm(architecture: Architecture, weights: DecoderWeights, x: Tensor) -> Tensor:
    """The hidden states that logits and values are made from, of what `hidden_states` gave."""
    return F.rms_norm(x, (architecture.hidden,), weights.norm, architecture.norm_eps)


def rotary_table(architecture: Architecture, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, float32 `[positions, d]`: rotated is `x * cos + swapped(x) * sin`."""
    frequencies = torch.tensor(architecture.rope.frequencies(architecture.head_dim), dtype=torch.float32)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _layer(parameters: Mapping[str, Tensor], number: int, architecture: Architecture) -> LayerWeights:
    a, prefix = architecture, f"blocks.{number}."
    qk_norm = None
    if a.qk_norm:
        q_norm, k_norm = (parameters[f"{prefix}attention.{letter}_norm.weight"] for letter in "qk")
        qk_norm = torch.cat((q_norm.expand(a.heads, -1), k_norm.expand(a.kv_heads, -1)))
    return LayerWeights(
        attention_norm=parameters[prefix + "attention_norm.weight"],
        qkv=parameters[prefix + "attention.qkv.weight"],
        qkv_bias=parameters.get(prefix + "attention.qkv.bias"),
        qk_norm=qk_norm,
        out=parameters[prefix + "attention.out.weight"],
        out_bias=parameters.get(prefix + "attention.out.bias"),
        mlp_norm=parameters[prefix + "mlp_norm.weight"],
        gate_up=parameters[prefix + "gate_up.weight"],
        gate_up_bias=parameters.get(prefix + "gate_up.bias"),
        down=parameters[prefix + "down.weight"],
        down_bias=parameters.get(prefix + "down.bias"),
    )
