"""Attention of the sequences of a pass, each by itself, for any model of transformers that lets attention be chosen.

A sequence may be a path through several nodes of the pass (see `gyre.workloads.learner.packing`): a node's queries then
see the keys of its path.

Transformers' own ways either build a mask of all tokens by all tokens of the pass, and compute what it then hides, or
want a package that is compiled for one GPU and one torch. Here a pass costs what its sequences cost alone, with
torch's own kernels: by their bounds where the device has a kernel for that, else sequence by sequence.

Windows, caps of scores and sinks that a layer asks for are kept. What else a layer may ask for is not known here: see
`packing_check`, which compares with the model's own attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from gyre.workloads.learner.packing import on_device
from gyre.workloads.learner.path_keys import PathKeys

try:  # torch 2.10 and newer
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

NAME = "gyre_packed"
"""How transformers knows it. It has no mask function of this name, so models build no masks."""

_LARGEST_HEAD = 256
"""Dimensions of a head that the kernels for bounds take."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Nodes side by side in one row of tokens: their lengths on the host, bounds int32 `[n + 1]` on the device, and the
    keys of their `paths`, None where each attends to itself. `kept`: so are those keys, because autograd's own hooks
    see to them."""

    lengths: tuple[int, ...]
    bounds: Tensor
    paths: PathKeys | None = None
    kept: bool = True

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, parents: Sequence[int] = (), *, kept: bool = True
    ) -> Segments:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), on_device(ends, device), PathKeys.of(lengths, parents, device), kept)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.paths is None else self.paths.lengths


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`[1, tokens, heads, d]` of queries `[1, heads, tokens, d]`, keys and values `[1, kv, tokens, d]`. Raises
    ValueError for a model that does not pass on the segments, or makes masks of its own."""
    if segments is None or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} does not say where sequences begin, or has a mask of its own."
        )
    window = sliding_window or max(segments.key_lengths)
    if softcap is None and s_aux is None and _by_bounds(query, value):
        return _attend_by_bounds(query, key, value, segments, window, scaling)[None], None
    if segments.paths is not None:
        key, value = (segments.paths.gather(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (key, value))
    parts = zip(
        torch.split(query, list(segments.lengths), dim=2),
        *(torch.split(x, list(segments.key_lengths), dim=2) for x in (key, value)),
        strict=True,
    )
    if softcap is None and s_aux is None:
        mixed = [_attend(q, k, v, window, scaling) for q, k, v in parts]
    else:
        mixed = [_attend_by_scores(q, k, v, window, scaling, softcap, s_aux) for q, k, v in parts]
    return torch.cat(mixed, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)


def _by_bounds(query: Tensor, value: Tensor) -> bool:
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
    )


@cache
def _takes_fewer_keys() -> bool:
    """Whether the kernel takes fewer heads of keys than of queries."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_by_bounds(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int, scaling: float | None
) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest, paths = max(segments.lengths), segments.paths
    bounds, longest_path = (segments.bounds, longest) if paths is None else (paths.bounds, max(paths.lengths))
    options: dict[str, Any] = {"scale": scaling, "window_size": (window - 1, 0)}
    if window >= longest_path:
        options["window_size"] = (-1, 0)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and _takes_fewer_keys():
        options["enable_gqa"] = True
        repeats = 1

    def attention(keys: Tensor, values: Tensor) -> Tensor:
        found = varlen_attn(q, keys, values, segments.bounds, bounds, longest, longest_path, **options)
        assert isinstance(found, Tensor)
        return found

    if paths is not None:
        return paths.attend(attention, k, v, repeats=repeats, kept=segments.kept)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return attention(k, v)


def _attend(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None) -> Tensor:
    queries, keys, gqa = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    if queries == keys <= window:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
        )
    seen = _seen(queries, keys, window, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=gqa)


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With scores capped at `softcap`, and for each head a sink, which takes a share of the attention and gives
    nothing."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = _seen(query.shape[2], key.shape[2], window, query.device)
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1).to(value.dtype) @ value
    column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return shares.to(value.dtype) @ value


def _seen(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query sees: itself and `window - 1` before it, the last query the last key; bool
    `[queries, keys]`."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    before = keys - queries
    return every.tril(before) & ~every.tril(before - window)
