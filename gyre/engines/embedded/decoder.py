"""One step of the model over a flat batch of tokens, and the cache of keys and values.

A step takes rows: one token each, of any sequence, at any position. Row `i` below `Batch.slots` belongs to slot `i`;
rows after that are further tokens of slots that are being prefilled. Their keys and values are written before
attention, so a chunk's tokens see each other.

Attention, its cache and rotary positions are float32 whatever the weights are: torch's CPU attention is faster so than
in bfloat16.

Invariants: *batch invariance* (`invariance` says how). The cache holds finite numbers everywhere, so what is masked
adds zero. This module must not know about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.engines.embedded.checkpoint import LayerWeights, Weights
from gyre.engines.embedded.invariance import attend, mask_of
from gyre.models.architecture import Architecture

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start..end` (end exclusive) are tokens of `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's input.

    `tokens`, `positions`: one for each row, which come as: `slots` rows of slots 0, 1, ...; then the rows of
    `chunks`. `sampled`: the rows whose logits are wanted. `key_length`: at least the longest position + 1.
    """

    tokens: list[int]
    positions: list[int]
    slots: int
    chunks: list[Chunk]
    sampled: list[int]
    key_length: int


class KVCache:
    """Keys and values: for each layer `[slots + 1, kv_heads, capacity, head_dim]`; the last slot takes padding.

    Memory is zero pages until it is written, so slots that are never used cost nothing.
    """

    def __init__(self, architecture: Architecture, slots: int, capacity: int) -> None:
        self._architecture = architecture
        self.slots = slots
        self.capacity = capacity
        self.keys = [self._zeros(capacity) for _ in range(architecture.layers)]
        self.values = [self._zeros(capacity) for _ in range(architecture.layers)]

    def grow(self, capacity: int, held: Sequence[int]) -> None:
        """Make room for `capacity` positions a slot; of slot `i` the first `held[i]` stay."""
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                side[layer] = self._zeros(capacity)
                for slot, length in enumerate(held):
                    side[layer][slot, :, :length] = old[slot, :, :length]
        self.capacity = capacity

    def copy(self, source: int, target: int, length: int) -> None:
        """Slot `target` gets the first `length` positions of slot `source`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def zero(self, slot: int, start: int, end: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[slot, :, start:end].zero_()

    def _zeros(self, capacity: int) -> Tensor:
        """Like torch.zeros, which would touch every page."""
        a = self._architecture
        shape = (self.slots + 1, a.kv_heads, capacity, a.head_dim)
        size = int(np.prod(shape)) * torch.float32.itemsize
        memory = np.zeros(size + _ALIGNMENT_BYTES, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        return torch.from_numpy(memory[start : start + size]).view(torch.float32).view(shape)


class Decoder:
    """Runs steps. `fewest_rows` is the number of rows that products are padded to."""

    def __init__(self, architecture: Architecture, fewest_rows: int) -> None:
        self._architecture = architecture
        self._fewest_rows = fewest_rows
        self._frequencies = torch.tensor(
            architecture.rope.frequencies(architecture.head_dim), dtype=torch.float32
        )
        self._cos = self._sin = torch.empty(0)
        self._heads = torch.arange(architecture.kv_heads)

    def step(self, weights: Weights, cache: KVCache, batch: Batch) -> Tensor:
        """Writes the batch's keys and values, and returns float32 logits `[len(batch.sampled), vocab]`."""
        a = self._architecture
        pads = max(0, self._fewest_rows - len(batch.tokens))
        tokens = torch.tensor(batch.tokens + [0] * pads)
        positions = torch.tensor(batch.positions + [0] * pads)
        targets = self._targets(cache, batch, positions)
        cos, sin = self._rotary(cache.capacity, positions)
        masks = [mask_of(positions[: batch.slots], batch.key_length)]
        masks += [mask_of(positions[c.start : c.end], batch.key_length) for c in batch.chunks]

        x = weights.embed.index_select(0, tokens)
        for layer, w in enumerate(weights.layers):
            keys, values = cache.keys[layer], cache.values[layer]
            q = self._project(w, x, cos, sin, targets, keys, values)
            mixed = self._mix(q, keys, values, masks, batch).to(x.dtype)
            x = x + F.linear(mixed, w.out, w.out_bias)
            h = F.rms_norm(x, (a.hidden,), w.mlp_norm, a.norm_eps)
            gate, up = F.linear(h, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), w.down, w.down_bias)

        wanted = batch.sampled + [0] * max(0, self._fewest_rows - len(batch.sampled))
        if wanted != list(range(len(x))):
            x = x.index_select(0, torch.tensor(wanted))
        x = F.rms_norm(x, (a.hidden,), weights.norm, a.norm_eps)
        return F.linear(x, weights.head)[: len(batch.sampled)].float()

    def _targets(self, cache: KVCache, batch: Batch, positions: Tensor) -> Tensor:
        """Where in the cache, seen as a list of heads' keys, each row's go: int64 `[rows * kv_heads]`."""
        slots = torch.full_like(positions, cache.slots)
        slots[: batch.slots] = torch.arange(batch.slots)
        for chunk in batch.chunks:
            slots[chunk.start : chunk.end] = chunk.slot
        first = slots * (self._architecture.kv_heads * cache.capacity) + positions
        return (first[:, None] + self._heads * cache.capacity).view(-1)

    def _project(
        self,
        w: LayerWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        targets: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Queries `[rows, kv_heads, group, d]`; keys and values go to the cache."""
        a = self._architecture
        h = F.rms_norm(x, (a.hidden,), w.attention_norm, a.norm_eps)
        heads = F.linear(h, w.qkv, w.qkv_bias).float().view(len(x), a.heads + 2 * a.kv_heads, a.head_dim)
        qk, v = heads[:, : a.heads + a.kv_heads], heads[:, a.heads + a.kv_heads :]
        if w.qk_norm is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, a.norm_eps) * w.qk_norm
        first, second = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, torch.cat((second, first), dim=-1), sin)
        keys.view(-1, a.head_dim).index_copy_(0, targets, qk[:, a.heads :].reshape(-1, a.head_dim))
        values.view(-1, a.head_dim).index_copy_(0, targets, v.reshape(-1, a.head_dim))
        return qk[:, : a.heads].view(-1, a.kv_heads, a.group, a.head_dim)

    def _mix(self, q: Tensor, keys: Tensor, values: Tensor, masks: list[Tensor], batch: Batch) -> Tensor:
        """What attention gives, `[rows, heads * d]`; rows of padding give zero."""
        slots, length = batch.slots, batch.key_length
        mixed = [attend(q[:slots], keys[:slots, :, :length], values[:slots, :, :length], masks[0])]
        for chunk, mask in zip(batch.chunks, masks[1:], strict=True):
            rows = chunk.end - chunk.start
            mixed.append(
                attend(
                    q[chunk.start : chunk.end],
                    keys[chunk.slot, :, :length].expand(rows, -1, -1, -1),
                    values[chunk.slot, :, :length].expand(rows, -1, -1, -1),
                    mask,
                )
            )
        pads = len(q) - sum(len(part) for part in mixed)
        if pads:
            mixed.append(q.new_zeros((pads, *q.shape[1:])))
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return joined.reshape(len(q), -1)

    def _rotary(self, capacity: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines `[rows, 1, d]`: rotated is `x * cos + swapped(x) * sin`."""
        if len(self._cos) != capacity:
            angles = torch.outer(torch.arange(capacity, dtype=torch.float32), self._frequencies)
            cos, sin = angles.cos(), angles.sin()
            self._cos = torch.cat((cos, cos), dim=-1)
            self._sin = torch.cat((-sin, sin), dim=-1)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]
