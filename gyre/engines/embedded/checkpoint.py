"""Safetensors on disk to `Weights`, the tensors that one step of the model reads.

Invariants:
- *all or nothing*: `load_weights` returns all tensors of the architecture, each of its shape, or raises; it changes
  nothing that is being served;
- *nobody else's memory*: no tensor is a view of the file, which may be written anew while it is served.

Products that share an input are one product: q, k, v in one matrix, gate and up in another.
This module must not know about requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gyre.models.architecture import Architecture
from gyre.models.errors import ModelFolderError
from gyre.models.folder import SafetensorsFolder
from gyre.models.tensor_names import parameter_parts


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
class Weights:
    """Everything that is learned. `head` is `embed` where they are tied."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


def load_weights(model_path: Path, architecture: Architecture, dtype: torch.dtype) -> Weights:
    """The weights in the folder `model_path`. Raises ModelFolderError where it holds none, or another model's."""
    source = SafetensorsFolder(model_path)
    if not source:
        raise ModelFolderError(
            f"{model_path} holds no safetensors.",
            hint="Save the model with save_pretrained, or check the path.",
        )
    source.require(architecture)

    def joined(name: str, parts: tuple[str, ...]) -> Tensor:
        wanted = torch.float32 if name.endswith(_HEAD_NORMS) else dtype
        return torch.cat([source(part).to(wanted) for part in parts])  # cat copies, of one tensor too

    fused = {name: joined(name, parts) for name, parts in parameter_parts(architecture).items()}
    layers = tuple(_layer(fused, number, architecture) for number in range(architecture.layers))
    embed = fused["embed.weight"]
    return Weights(embed, layers, fused["norm.weight"], fused.get("head.weight", embed))


def _layer(fused: dict[str, Tensor], number: int, architecture: Architecture) -> LayerWeights:
    a, prefix = architecture, f"blocks.{number}."
    qk_norm = None
    if a.qk_norm:
        q_norm, k_norm = (fused[f"{prefix}attention.{letter}_norm.weight"] for letter in "qk")
        qk_norm = torch.cat((q_norm.expand(a.heads, -1), k_norm.expand(a.kv_heads, -1)))
    return LayerWeights(
        attention_norm=fused[prefix + "attention_norm.weight"],
        qkv=fused[prefix + "attention.qkv.weight"],
        qkv_bias=fused.get(prefix + "attention.qkv.bias"),
        qk_norm=qk_norm,
        out=fused[prefix + "attention.out.weight"],
        out_bias=fused.get(prefix + "attention.out.bias"),
        mlp_norm=fused[prefix + "mlp_norm.weight"],
        gate_up=fused[prefix + "gate_up.weight"],
        gate_up_bias=fused.get(prefix + "gate_up.bias"),
        down=fused[prefix + "down.weight"],
        down_bias=fused.get(prefix + "down.bias"),
    )
