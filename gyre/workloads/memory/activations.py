"""What a token of a pass leaves on a device until its gradient: bytes that autograd saves, as the back ends' own code
has them on a GPU, where attention goes by the sequences' bounds.

Tensors whose memory is a view of another's are counted with that one. This module must not import torch, nor know
about ranks beyond their numbers.
"""

from __future__ import annotations

from gyre.config.sections import LoraSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory.parameters import adapted

FLOAT = 4
"""Bytes of a float32, which statistics of norms and of attention are."""


def megatron_layer(
    shape: Architecture, *, width: int, tensor_parallel: int = 1, sequence_parallel: bool = False
) -> int:
    """Bytes a token of one layer of Megatron's, in numbers of `width` bytes."""
    a, share = shape, tensor_parallel
    queries, keys = a.heads * a.head_dim // share, a.kv_heads * a.head_dim // share
    norms = 2 * (2 * width * a.hidden + FLOAT) // (share if sequence_parallel else 1)
    # Queries, keys and values come of one product. Its memory stays where one of them goes on as a view of it: to a
    # norm, or, where each head of queries has keys of its own, to attention.
    joined = width * (queries + 2 * keys) if a.qk_norm or a.group == 1 else 0
    if a.qk_norm:
        # Queries are cut out as a copy where there are several heads of keys between them.
        cut = width * queries if a.group > 1 and a.kv_heads > share else 0
        norms += cut + FLOAT * (a.heads + a.kv_heads) // share
    # Queries, keys and values, each for every head of queries, and what comes out. Values that are not repeated are a
    # view of the product.
    attention = width * (4 if a.group > 1 else 3) * queries + FLOAT * a.heads // share
    mlp = width * 3 * a.mlp // share
    return norms + joined + attention + mlp


def fsdp_layer(shape: Architecture, *, width: int, fused: bool, lora: LoraSettings | None = None) -> int:
    """Bytes a token of one layer of transformers, in numbers of `width` bytes: with `lora` its own parameters are
    frozen, and what only their gradients would need is not kept. `fused` as `gyre.workloads.fsdp.fused`."""
    a = shape
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    trained = lora is None
    found = 0 if lora is None else width * lora.rank * len(adapted(lora))
    reads = frozenset() if lora is None else adapted(lora)
    norms = 2 * (normed(a.hidden, width=width, fused=fused, trained=trained) + FLOAT)
    if trained or reads & {"q_proj", "k_proj", "v_proj"}:
        norms += width * a.hidden
    if trained or reads & {"gate_proj", "up_proj"}:
        norms += width * a.hidden
    if a.qk_norm:
        heads = a.heads + a.kv_heads
        norms += normed(queries + keys, width=width, fused=fused, trained=trained) + FLOAT * heads
    attention = width * (2 * queries + 2 * keys) + FLOAT * a.heads
    mlp = width * (2 if fused else 3) * a.mlp
    if trained or "down_proj" in reads:
        mlp += width * a.mlp
    return found + norms + attention + mlp


def normed(numbers: int, *, width: int, fused: bool, trained: bool) -> int:
    """Bytes that a norm of transformers keeps of its input, beside a scale for each row: `fused` the input itself, else
    a copy in float32, and where its weight is trained what it multiplies with that."""
    if fused:
        return width * numbers
    return (FLOAT + (width if trained else 0)) * numbers


def kept_input(shape: Architecture, *, width: int) -> int:
    """Bytes a token of one layer whose activations are computed again."""
    return width * shape.hidden


def angles(shape: Architecture, *, width: int, whole: bool) -> int:
    """Bytes a token of rotary cosines and sines, once for all layers: of `whole` heads, or of their half."""
    return 2 * width * (shape.head_dim if whole else shape.head_dim // 2)
