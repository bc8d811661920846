"""A Qwen3-like decoder: RMSNorm, rotary positions, grouped-query attention with normed q and k, SwiGLU. By its options
it is a Qwen2 or a Llama, too.

Invariant *one function*: prefill, cached decoding and the training forward are the same code, so that a
sampler's log-probs and a trainer's agree up to the rounding of differently shaped products.

Sources: RoFormer (arXiv 2104.09864), GQA (arXiv 2305.13245), SwiGLU (arXiv 2002.05202), Qwen3 (arXiv 2505.09388).
This module must not know about tasks, sampling, losses or Gyre's workloads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The decoder's shape. `hidden / heads` must be even; `heads` a multiple of `kv_heads`."""

    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    max_positions: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    head_size: int = 0
    """0: `hidden / heads`."""
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    frequencies: tuple[float, ...] = ()
    """Radians a position of each pair of rotary dimensions; () takes them from `rope_theta`."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads


class KVCache:
    """Keys and values of every layer, allocated once for `capacity` positions: `[rows, kv_heads, capacity, d]`."""

    def __init__(self, config: ModelConfig, rows: int, capacity: int) -> None:
        shape = (rows, config.kv_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(config.layers)]
        self.values = [torch.zeros(shape) for _ in range(config.layers)]
        self.length = 0

    def select(self, rows: Tensor) -> None:
        """Keep, drop or repeat rows: row `j` becomes what row `rows[j]` (int64) was."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden, width + 2 * kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.hidden, bias=config.out_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        config = self.config
        rows, length, _ = x.shape
        heads = (
            self.qkv(x)
            .view(rows, length, config.heads + 2 * config.kv_heads, config.head_dim)
            .transpose(1, 2)
        )
        q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        q, k = _rotate(self.q_norm(q), rotary), _rotate(self.k_norm(k), rotary)
        if cache is not None:
            end = cache.length + length
            cache.keys[layer][:, :, cache.length : end] = k
            cache.values[layer][:, :, cache.length : end] = v
            k, v = cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]
        if config.kv_heads != config.heads:
            repeats = config.heads // config.kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return joined


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.gate_up = nn.Linear(config.hidden, 2 * config.mlp, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp, config.hidden, bias=config.mlp_bias)

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

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden, config.vocab, bias=False)
        if config.frequencies:
            frequencies = torch.tensor(config.frequencies)
        else:
            frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_positions), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        depth_scale = 1.0 / math.sqrt(2 * self.config.layers)
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
            if tokens.shape[1] > self.config.max_positions:
                raise IndexError(f"{tokens.shape[1]} tokens exceed max_positions={self.config.max_positions}")
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

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        # Tied embeddings leave no head of the decoder's own, which nothing would train.
        self.decoder = Decoder(replace(config, tied_embeddings=True), seed=seed)
        self.value_head = nn.Linear(config.hidden, 1)
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
