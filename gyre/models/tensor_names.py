"""The names of a decoder's tensors: Hugging Face's in a checkpoint, and the decoder's own, where those that are
multiplied with the same input are one matrix.

| the decoder's | Hugging Face's, joined by rows |
| --- | --- |
| `blocks.N.attention.qkv` | `self_attn.q_proj`, `k_proj`, `v_proj` |
| `blocks.N.gate_up` | `mlp.gate_proj`, `up_proj` |
| every other | one tensor |

Naming needs no torch. Invariant *lossless*: `from_names(to_names(state)) == state`, bit by bit.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from gyre.models.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"

HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The output layers of a policy and of a reward model."""

VALUE_WEIGHT = "value_head.weight"
VALUE_BIAS = "value_head.bias"
"""A critic's head, `[1, hidden]` and `[1]`: no folder has them."""


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and the shape of every tensor that a checkpoint must hold."""
    a = architecture
    width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (a.vocab, a.hidden)}
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
    shapes[NORM] = (a.hidden,)
    if not a.tied:
        shapes[HEAD] = (a.vocab, a.hidden)
    return shapes


def value_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The same of a value model: the decoder without its output layer, and a value head."""
    shapes = expected_shapes(architecture)
    shapes.pop(HEAD, None)
    return shapes | {VALUE_WEIGHT: (1, architecture.hidden), VALUE_BIAS: (1,)}


def parameter_parts(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Each of the decoder's parameters by its own name, and the tensors of a checkpoint whose rows it joins."""
    a = architecture
    found: dict[str, tuple[str, ...]] = {"embed.weight": (EMBEDDING,)}
    for layer in range(a.layers):
        mine, theirs = f"blocks.{layer}.", f"model.layers.{layer}."

        def add(name: str, *parts: str, mine: str = mine, theirs: str = theirs) -> None:
            found[mine + name] = tuple(theirs + part for part in parts)

        add("attention_norm.weight", "input_layernorm.weight")
        for kind in _kinds(a.qkv_bias):
            add(f"attention.qkv.{kind}", *(f"self_attn.{letter}_proj.{kind}" for letter in "qkv"))
        for kind in _kinds(a.out_bias):
            add(f"attention.out.{kind}", f"self_attn.o_proj.{kind}")
        if a.qk_norm:
            for letter in "qk":
                add(f"attention.{letter}_norm.weight", f"self_attn.{letter}_norm.weight")
        add("mlp_norm.weight", "post_attention_layernorm.weight")
        for kind in _kinds(a.mlp_bias):
            add(f"gate_up.{kind}", f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}")
            add(f"down.{kind}", f"mlp.down_proj.{kind}")
    found["norm.weight"] = (NORM,)
    if not a.tied:
        found["head.weight"] = (HEAD,)
    return found


def is_harmless(name: str, wanted: Container[str]) -> bool:
    """Whether a folder may hold this tensor although it is not wanted: old models saved their rotary angles, tied ones
    the embedding twice, and a head that is not wanted is a policy's or a reward model's."""
    return name.endswith("rotary_emb.inv_freq") or (name in (HEAD, SCORE) and HEAD not in wanted)


def to_names(state: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """The decoder's parameters by Hugging Face's names; the parts of a joined one are views of it."""
    import torch

    shapes = expected_shapes(architecture)
    named: dict[str, Tensor] = {}
    for mine, parts in parameter_parts(architecture).items():
        pieces = [state[mine]]
        if len(parts) > 1:
            pieces = list(torch.split(state[mine], [shapes[part][0] for part in parts]))
        named.update(zip(parts, pieces, strict=True))
    return named


def from_names(named: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """The inverse of `to_names`. Raises KeyError for a tensor that is missing."""
    import torch

    return {
        mine: torch.cat([named[part] for part in parts]) if len(parts) > 1 else named[parts[0]]
        for mine, parts in parameter_parts(architecture).items()
    }


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
