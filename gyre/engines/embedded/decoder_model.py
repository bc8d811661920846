"""Gyre's own decoder as the engine's core wants it: batch invariant, for the families that `gyre.models` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from gyre.engines.embedded.batch_step import BatchDecoder, KVCache
from gyre.engines.embedded.invariance import Scheme, measure
from gyre.engines.embedded.served_model import StepBatch
from gyre.models.architecture import Architecture
from gyre.models.decoder import DecoderWeights, load_weights
from gyre.models.errors import ModelFolderError

_FIRST_CAPACITY = 256


class DecoderModel:
    """The decoder of one architecture."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    @property
    def family(self) -> str:
        return self.architecture.family

    @property
    def vocab(self) -> int:
        return self.architecture.vocab

    @property
    def max_positions(self) -> int:
        return self.architecture.max_positions

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.architecture.eos_token_ids

    def load(self, folder: Path, dtype: torch.dtype) -> DecoderWeights:
        return load_weights(folder, self.architecture, dtype)

    takes_adapters = False

    def load_adapter(self, folder: Path, dtype: torch.dtype) -> NoReturn:
        raise ModelFolderError(
            f"{folder}: the engine was started for no adapters.", hint="Start it with --enable-lora."
        )

    def runner(
        self, weights: DecoderWeights, *, slots: int, prefill_tokens: int, context_length: int
    ) -> DecoderRunner:
        scheme = _measure(
            self.architecture, weights, most_rows=slots + prefill_tokens, context_length=context_length
        )
        return DecoderRunner(self.architecture, scheme, slots, context_length)


class DecoderRunner:
    invariant = True
    shares_prefixes = True
    whole_prompts = False

    def __init__(self, architecture: Architecture, scheme: Scheme, slots: int, context_length: int) -> None:
        self.scheme = scheme
        self._decoder = BatchDecoder(architecture, scheme.fewest_rows)
        self._cache = KVCache(architecture, slots, self.key_length(min(_FIRST_CAPACITY, context_length)))

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    def key_length(self, longest: int) -> int:
        return self.scheme.key_lengths.covering(longest)

    def grow(self, capacity: int, held: Sequence[int]) -> None:
        self._cache.grow(capacity, held)

    def rearrange(self, targets: list[int], sources: list[int], kept: list[int], end: int) -> None:
        self._cache.rearrange(targets, sources, kept, end)

    def step(self, weights: DecoderWeights, batch: StepBatch) -> Tensor:
        return self._decoder.step(weights, self._cache, batch)


def _measure(
    architecture: Architecture, weights: DecoderWeights, *, most_rows: int, context_length: int
) -> Scheme:
    first = weights.layers[0]
    return measure(
        (
            (first.qkv, first.qkv_bias),
            (first.out, first.out_bias),
            (first.gate_up, first.gate_up_bias),
            (first.down, first.down_bias),
            (weights.head, None),
        ),
        group=architecture.group,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        most_rows=most_rows,
        context_length=context_length,
    )
