"""A Qwen3-like decoder: RMSNorm, rotary positions, grouped-query attention with normed q and k, SwiGLU. By its options
it is a Qwen2 or a Llama, too.

Invariant *one function*: prefill, cached decoding and the training forward are the same code, so that a
sampler's log-probs and a trainer's agree up to the rounding of differently shaped products.

Sources: RoFormer (arXiv 2104.09864), GQA (arXiv 2305.13245), SwiGLU (arXiv 2002.05202), Qwen3 (arXiv 2505.09388).
This module must not know about tasks, sampling, losses or Gyre's workloads.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre.models.architecture import Architecture


class KVCache:
    """Keys and values of every layer, allocated once for `capacity` positions: `[rows, kv_heads, capacity, d]`."""

    def __init__(self, architecture: Architecture, rows: int, capacity: int) -> None:
        a = architecture
        shape = (rows, a.kv_heads, capacity, a.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(a.layers)]
        self.values = [torch.zeros(shape) for _ in range(a.layers)]
        self.length = 0

    def select(self, rows: Tensor) -> None:
        """Keep, drop or repeat rows: row `j` becomes what row `rows[j]` (int64) was."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]


class Attention(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.qkv = nn.Linear(a.hidden, width + 2 * kv_width, bias=a.qkv_bias)
        self.out = nn.Linear(width, a.hidden, bias=a.out_bias)
        self.q_norm = nn.RMSNorm(a.head_dim, eps=a.norm_eps) if a.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(a.head_dim, eps=a.norm_eps) if a.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        a = self.architecture
        rows, length, _ = x.shape
        heads = self.qkv(x).view(rows, length, a.heads + 2 * a.kv_heads, a.head_dim).transpose(1, 2)
        q, k, v = heads.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
        q, k = _rotate(self.q_norm(q), rotary), _rotate(self.k_norm(k), rotary)
        if cache is not None:
            end = cache.length + length
            cache.keys[layer][:, :, cache.length : end] = k
            cache.values[layer][:, :, cache.length : end] = v
            k, v = cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]
        if a.kv_heads != a.heads:
            repeats = a.heads // a.kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return joined


class Block(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.attention_norm = nn.RMSNorm(a.hidden, eps=a.norm_eps)
        self.attention = Attention(architecture)
        self.mlp_norm = nn.RMSNorm(a.hidden, eps=a.norm_eps)
        self.gate_up = nn.Linear(a.hidden, 2 * a.mlp, bias=a.mlp_bias)
        self.down = nn.Linear(a.mlp, a.hidden, bias=a.mlp_bias)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache, layer)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class Decoder(nn.Module):
    """The language model. Weights are drawn from a generator of their own, seeded with `seed`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.embed = nn.Embedding(a.vocab, a.hidden)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.hidden, eps=a.norm_eps)
        self.head = None if a.tied else nn.Linear(a.hidden, a.vocab, bias=False)
        frequencies = torch.tensor(a.rope.frequencies(a.head_dim))
        angles = torch.outer(torch.arange(a.max_positions), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        depth_scale = 1.0 / math.sqrt(2 * self.architecture.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            scale = depth_scale if name.endswith(("out.weight", "down.weight")) else 1.0
            nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]), generator=generator)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits float32 `[rows, length, vocab]` of int64 `tokens` `[rows, length]`; see `hidden`."""
        x = self.hidden(tokens, positions=positions, mask=mask, cache=cache)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the logits are made from, float32 `[rows, length, hidden]`.

        Without `cache` and `mask` attention is causal over the whole of `tokens`, which then starts at position
        0. With `cache`, the tokens follow the `cache.length` already there, and the cache grows by `length`;
        `mask` (bool, broadcastable to `[rows, heads, length, cache.length + length]`, True where attended) is
        then required. Positions at or beyond `max_positions` raise IndexError.
        """
        if positions is None:
            rotary = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
            if tokens.shape[1] > self.architecture.max_positions:
                raise IndexError(
                    f"{tokens.shape[1]} tokens exceed max_positions={self.architecture.max_positions}"
                )
        else:
            rotary = self.cos[positions][:, None], self.sin[positions][:, None]
        if cache is not None and mask is None:
            raise ValueError("a forward with a cache needs a mask")
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, mask, cache, layer)
        if cache is not None:
            cache.length += tokens.shape[1]
        normed: Tensor = self.norm(x)
        return normed


class ValueModel(nn.Module):
    """The decoder with one number instead of logits: what return is expected after the tokens so far.

    The head begins at zero, so that the first values are 0, unless it is set to something else.
    """

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        # Tied embeddings leave no head of the decoder's own, which nothing would train.
        self.decoder = Decoder(replace(architecture, tied=True), seed=seed)
        self.value_head = nn.Linear(architecture.hidden, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Values float32 `[rows, length]` of int64 `tokens` `[rows, length]`, attention causal."""
        values: Tensor = self.value_head(self.decoder.hidden(tokens))[:, :, 0]
        return values


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
