"""How many numbers a decoder has on one rank: in a layer, and outside of the layers.

This module must not import torch, nor know what is kept beside a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gyre.config.sections import LoraSettings
from gyre.config.sections.lora import ALL_LINEAR
from gyre.models.architecture import Architecture

VOCABULARY_MULTIPLE = 8
"""Megatron's embedding has a multiple of so many rows, and of its tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers on a rank: of one layer, of the embedding, of an output layer of its own, and of what else stands outside
    of the layers."""

    layer: int
    layers: int
    embedding: int
    head: int
    other: int

    @property
    def outside(self) -> int:
        return self.embedding + self.head + self.other

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.outside


def parameters_of(
    shape: Architecture,
    *,
    values: bool = False,
    tensor_parallel: int = 1,
    layers: int | None = None,
    first: bool = True,
    last: bool = True,
    padded: bool = False,
) -> Parameters:
    """Of a rank that has a part of `tensor_parallel` of `layers` layers (None: all); the `first` stage has the
    embedding, the `last` one norm and output layer. With `values` a value head is the output layer. `padded` is
    Megatron's vocabulary."""
    a, share = shape, tensor_parallel
    width, keys = a.heads * a.head_dim, 2 * a.kv_heads * a.head_dim
    layer = (
        ((width + keys) * a.hidden + width * a.hidden + 3 * a.mlp * a.hidden) // share
        + 2 * a.hidden
        + (2 * a.head_dim if a.qk_norm else 0)
        + ((width + keys) // share if a.qkv_bias else 0)
        + (a.hidden if a.out_bias else 0)
        + (2 * a.mlp // share + a.hidden if a.mlp_bias else 0)
    )
    multiple = math.lcm(VOCABULARY_MULTIPLE, share) if padded else 1
    rows = -(-a.vocab // multiple) * multiple // share
    tied = a.tied and not values
    own_head = 0 if not last or (tied and first) else a.hidden + 1 if values else rows * a.hidden
    return Parameters(
        layer=layer,
        layers=a.layers if layers is None else layers,
        embedding=rows * a.hidden if first else 0,
        head=own_head,
        other=a.hidden if last else 0,
    )


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder's layer, by the ends of their names."""


def adapted(lora: LoraSettings) -> frozenset[str]:
    """Those of `LINEARS` that have an adapter."""
    asked = lora.target_modules
    if asked == ALL_LINEAR:
        return frozenset(LINEARS)
    return frozenset(one for one in LINEARS if any(one == name.rpartition(".")[2] for name in asked))


def adapter_of(shape: Architecture, lora: LoraSettings) -> int:
    """Numbers of an adapter in one layer."""
    a = shape
    width, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    sizes = {
        "q_proj": a.hidden + width,
        "k_proj": a.hidden + keys,
        "v_proj": a.hidden + keys,
        "o_proj": width + a.hidden,
        "gate_proj": a.hidden + a.mlp,
        "up_proj": a.hidden + a.mlp,
        "down_proj": a.mlp + a.hidden,
    }
    return lora.rank * sum(sizes[name] for name in adapted(lora))
