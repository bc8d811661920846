"""Safetensors on disk to `Weights`, the tensors that one step of the model reads.

Invariants:
- *all or nothing*: `load_weights` returns all tensors of the architecture, each of its shape, or raises; it changes
  nothing that is being served;
- *nobody else's memory*: no tensor is a view of the file, which may be written anew while it is served.

Products that share an input are one product: q, k, v in one matrix, gate and up in another.
This module must not know about requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.engines.embedded.architecture import Architecture
from gyre.engines.embedded.errors import CheckpointError


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


def load_weights(model_path: Path, architecture: Architecture, dtype: torch.dtype) -> Weights:
    """The weights in the folder `model_path`: `model.safetensors`, or shards with `model.safetensors.index.json`.

    Raises CheckpointError for a file that cannot be read, a tensor that is missing, of another shape or not
    known.
    """
    with ExitStack() as stack:
        return _fuse(_read(model_path, architecture, stack), architecture, dtype)


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint must hold."""
    a = architecture
    width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab, a.hidden)}
    for layer in range(a.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (a.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (a.hidden,)
        linears = {
            "self_attn.q_proj": (width, a.hidden, a.qkv_bias),
            "self_attn.k_proj": (kv_width, a.hidden, a.qkv_bias),
            "self_attn.v_proj": (kv_width, a.hidden, a.qkv_bias),
            "self_attn.o_proj": (a.hidden, width, a.out_bias),
            "mlp.gate_proj": (a.mlp, a.hidden, a.mlp_bias),
            "mlp.up_proj": (a.mlp, a.hidden, a.mlp_bias),
            "mlp.down_proj": (a.hidden, a.mlp, a.mlp_bias),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if a.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (a.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (a.head_dim,)
    shapes["model.norm.weight"] = (a.hidden,)
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocab, a.hidden)
    return shapes


def _read(model_path: Path, architecture: Architecture, stack: ExitStack) -> dict[str, Tensor]:
    expected = expected_shapes(architecture)
    found: dict[str, Any] = {}
    for path in _files(model_path):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
            found.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from None
    missing = expected.keys() - found.keys()
    if missing:
        raise CheckpointError(
            f"{model_path} lacks {len(missing)} tensors, {sorted(missing)[0]} among them.",
            hint="A checkpoint must hold all weights of the model.",
        )
    unknown = {name for name in found.keys() - expected.keys() if not _harmless(name, architecture)}
    if unknown:
        raise CheckpointError(
            f"{model_path} holds {len(unknown)} tensors that a {architecture.family} of this shape has not, "
            f"{sorted(unknown)[0]} among them.",
            hint="Check that it is a checkpoint of the model that is being served.",
        )
    tensors = {}
    for name, shape in expected.items():
        try:
            tensor = found[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{model_path}: {name} cannot be read: {error}.") from None
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"{model_path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, but the model has {shape}.",
                hint="Check that it is a checkpoint of the model that is being served.",
            )
        tensors[name] = tensor
    return tensors


def _files(model_path: Path) -> Iterator[Path]:
    index = model_path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of shards: {error!r}.") from None
        yield from (model_path / name for name in names)
        return
    single = model_path / "model.safetensors"
    if not single.exists():
        raise CheckpointError(
            f"{model_path} holds no model.safetensors and no model.safetensors.index.json.",
            hint="Save the model with save_pretrained, or check the path.",
        )
    yield single


def _harmless(name: str, architecture: Architecture) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (architecture.tied and name == "lm_head.weight")


def _fuse(tensors: dict[str, Tensor], architecture: Architecture, dtype: torch.dtype) -> Weights:
    a = architecture

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[name].to(dtype) for name in names])  # cat copies, of one tensor too

    def joined_bias(wanted: bool, *names: str) -> Tensor | None:
        return joined(*names) if wanted else None

    layers = []
    for layer in range(a.layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        qk_norm = None
        if a.qk_norm:
            qk_norm = torch.cat(
                (
                    tensors[attention + "q_norm.weight"].float().expand(a.heads, -1),
                    tensors[attention + "k_norm.weight"].float().expand(a.kv_heads, -1),
                )
            )
        layers.append(
            LayerWeights(
                attention_norm=joined(f"model.layers.{layer}.input_layernorm.weight"),
                qkv=joined(*(f"{attention}{part}_proj.weight" for part in "qkv")),
                qkv_bias=joined_bias(a.qkv_bias, *(f"{attention}{part}_proj.bias" for part in "qkv")),
                qk_norm=qk_norm,
                out=joined(attention + "o_proj.weight"),
                out_bias=joined_bias(a.out_bias, attention + "o_proj.bias"),
                mlp_norm=joined(f"model.layers.{layer}.post_attention_layernorm.weight"),
                gate_up=joined(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                gate_up_bias=joined_bias(a.mlp_bias, mlp + "gate_proj.bias", mlp + "up_proj.bias"),
                down=joined(mlp + "down_proj.weight"),
                down_bias=joined_bias(a.mlp_bias, mlp + "down_proj.bias"),
            )
        )
    embed = joined("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(layers),
        norm=joined("model.norm.weight"),
        head=embed if a.tied else joined("lm_head.weight"),
    )
