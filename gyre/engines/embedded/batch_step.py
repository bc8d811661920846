"""One step of Gyre's decoder over a flat batch of tokens, and the cache of keys and values.

Rows are those of `served_model`. Their keys and values are written before attention, so the tokens of one prefill see
each other. The layers are those of `gyre.models.decoder`; this is the attention that it is given.

Invariants: *batch invariance* (`invariance` says how). The cache holds finite numbers everywhere, so what is masked
adds zero. This module must not know about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.engines.embedded.invariance import attend, mask_of
from gyre.engines.embedded.served_model import StepBatch
from gyre.engines.embedded.zero_pages import zero_pages
from gyre.models.architecture import Architecture
from gyre.models.decoder import DecoderWeights, hidden_states, last_norm, rotary_table

_COPIED_KEYS = 1 << 16
"""Most keys of a head that are copied for a step: 256 rows of 256 positions, some megabytes."""


class KVCache:
    """Keys and values: for each layer `[slots + 1, kv_heads, capacity, head_dim]`; the last slot takes padding.

    Memory is zero pages until it is written, so slots that are never used cost nothing.
    """

    def __init__(self, architecture: Architecture, slots: int, capacity: int) -> None:
        self._architecture = architecture
        self.slots = slots
        self.capacity = capacity
        self._layers = [self._zeros(capacity) for _ in range(architecture.layers)]
        """Of each layer keys and values together, for moving both at once."""

    @property
    def keys(self) -> list[Tensor]:
        return [layer[0] for layer in self._layers]

    @property
    def values(self) -> list[Tensor]:
        return [layer[1] for layer in self._layers]

    def grow(self, capacity: int, held: Sequence[int]) -> None:
        """Make room for `capacity` positions a slot; of slot `i` the first `held[i]` stay."""
        for number, old in enumerate(self._layers):
            self._layers[number] = self._zeros(capacity)
            for slot, length in enumerate(held):
                self._layers[number][:, slot, :, :length] = old[:, slot, :, :length]
        self.capacity = capacity

    def rearrange(self, targets: list[int], sources: list[int], kept: list[int], end: int) -> None:
        """Slot `targets[i]` gets the first `kept[i]` positions of slot `sources[i]`, as they are before the call, and
        zeros from there to position `end`."""
        order = sorted(range(len(kept)), key=kept.__getitem__)  # those that keep as much stand together
        to = torch.tensor([targets[at] for at in order])
        come_from = torch.tensor([sources[at] for at in order])
        ends = [(keeps, len(list(alike))) for keeps, alike in groupby(kept[at] for at in order)]
        for layer in self._layers:
            part = layer[:, :, :, :end]
            moved = part.index_select(1, come_from)
            first = 0
            for keeps, count in ends:
                moved[:, first : first + count, :, keeps:] = 0.0  # set, for what is dropped may be NaN
                first += count
            part.index_copy_(1, to, moved)

    def _zeros(self, capacity: int) -> Tensor:
        a = self._architecture
        return zero_pages((2, self.slots + 1, a.kv_heads, capacity, a.head_dim), torch.float32)


class BatchDecoder:
    """Runs steps. `fewest_rows` is the number of rows that products are padded to."""

    def __init__(self, architecture: Architecture, fewest_rows: int) -> None:
        self._architecture = architecture
        self._fewest_rows = fewest_rows
        self._cos = self._sin = torch.empty(0)
        self._heads = torch.arange(architecture.kv_heads)

    def step(self, weights: DecoderWeights, cache: KVCache, batch: StepBatch) -> Tensor:
        """Writes the batch's keys and values, and returns float32 logits `[len(batch.sampled), vocab]`."""
        a = self._architecture
        pads = max(0, self._fewest_rows - len(batch.tokens))
        tokens = torch.tensor(batch.tokens + [0] * pads)
        positions = torch.tensor(batch.positions + [0] * pads)
        targets = self._targets(cache, batch, positions)
        mask = mask_of(
            positions[: max((part.end for part in batch.prefills), default=batch.slots)], batch.key_length
        )
        owners = self._owners(batch)
        all_keys, all_values = cache.keys, cache.values

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = all_keys[layer], all_values[layer]
            keys.view(-1, a.head_dim).index_copy_(0, targets, k.reshape(-1, a.head_dim))
            values.view(-1, a.head_dim).index_copy_(0, targets, v.reshape(-1, a.head_dim))
            return self._mix(q.view(-1, a.kv_heads, a.group, a.head_dim), keys, values, mask, owners, batch)

        x = hidden_states(a, weights, tokens, self._rotary(cache.capacity, positions), attention)
        wanted = batch.sampled + [0] * max(0, self._fewest_rows - len(batch.sampled))
        if wanted != list(range(len(x))):
            x = x.index_select(0, torch.tensor(wanted))
        return F.linear(last_norm(a, weights, x), weights.head)[: len(batch.sampled)].float()

    def _owners(self, batch: StepBatch) -> Tensor | None:
        """The slot of each prefilled row, where a copy of all these slots' keys is small: one product of short prompts
        instead of many. Else None: a long prompt's rows share its slot's keys."""
        rows = sum(part.end - part.start for part in batch.prefills)
        if len(batch.prefills) < 2 or rows * batch.key_length > _COPIED_KEYS:
            return None
        return torch.tensor([part.slot for part in batch.prefills for _ in range(part.start, part.end)])

    def _targets(self, cache: KVCache, batch: StepBatch, positions: Tensor) -> Tensor:
        """Where in the cache, seen as a list of heads' keys, each row's go: int64 `[rows * kv_heads]`."""
        slots = torch.full_like(positions, cache.slots)
        slots[: batch.slots] = torch.arange(batch.slots)
        for part in batch.prefills:
            slots[part.start : part.end] = part.slot
        first = slots * (self._architecture.kv_heads * cache.capacity) + positions
        return (first[:, None] + self._heads * cache.capacity).view(-1)

    def _mix(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, owners: Tensor | None, batch: StepBatch
    ) -> Tensor:
        """What attention gives, `[rows, heads * d]`; rows of padding give zero. `owners`: each prefilled row's slot,
        where those rows are computed together."""
        slots, length = batch.slots, batch.key_length
        mixed = [attend(q[:slots], keys[:slots, :, :length], values[:slots, :, :length], mask[:slots])]
        if owners is not None:
            rows = slice(slots, slots + len(owners))
            mine = keys[:, :, :length].index_select(0, owners), values[:, :, :length].index_select(0, owners)
            mixed.append(attend(q[rows], *mine, mask[rows]))
        else:
            for part in batch.prefills:
                own = slice(part.slot, part.slot + 1), slice(None), slice(None, length)
                count = part.end - part.start
                mixed.append(
                    attend(
                        q[part.start : part.end],
                        keys[own].expand(count, -1, -1, -1),
                        values[own].expand(count, -1, -1, -1),
                        mask[part.start : part.end],
                    )
                )
        pads = len(q) - sum(len(part) for part in mixed)
        if pads:
            mixed.append(q.new_zeros((pads, *q.shape[1:])))
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return joined.reshape(len(q), -1)

    def _rotary(self, capacity: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines `[rows, 1, d]`."""
        if len(self._cos) != capacity:
            self._cos, self._sin = rotary_table(self._architecture, capacity)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]
