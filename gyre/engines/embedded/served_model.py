"""What the engine's core asks of a model, whoever computes it: Gyre's own decoder (`decoder_model`) or transformers
(`transformers_model`).

A `ServedModel` is known from a folder's configuration alone; it loads weights, and makes a `Runner` that runs steps
over them. A step takes rows: one token each, of any slot, at any position. Row `i` below `StepBatch.slots` belongs to
slot `i`; rows after that are further tokens of slots that are being prefilled. A runner keeps what the slots' tokens
leave behind (keys and values, or a state), so that each token is computed once.

What every runner promises:
- *a plain forward's log-probs*: a row's logits are those of the model over the slot's tokens at once, up to rounding,
  whoever else is in the batch;
- *the weights that it is given*: a step computes with the weights of its call, over what the slots hold.

A runner that is `invariant` promises more: a row's bits do not depend on its neighbours (`invariance`).

This module must not know about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ModelWeights = Any
"""What `ServedModel.load` returned. Nobody but the model and its runners looks into it."""

LoadedAdapter = Any
"""What `ServedModel.load_adapter` returned. Nobody but the model and its runners looks into it."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows `start..end` (end exclusive) are prompt tokens of `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's input.

    `tokens`, `positions`: one for each row. First come `slots` rows of slots 0, 1, ...; then the rows of `prefills`,
    which are earlier tokens of their slots. `sampled`: the rows whose logits are wanted, all of them below `slots`.
    `key_length`: at least the longest position + 1. `adapters`: of each slot the one that its rows are computed with,
    None for the model alone; empty where no slot has one.
    """

    tokens: list[int]
    positions: list[int]
    slots: int
    prefills: list[PrefillRows]
    sampled: list[int]
    key_length: int
    adapters: list[LoadedAdapter | None] = field(default_factory=list)

    def by_adapter(self) -> list[tuple[LoadedAdapter | None, list[int]]]:
        """The slots of each adapter."""
        if not self.adapters:
            return [(None, list(range(self.slots)))]
        found: dict[int, tuple[LoadedAdapter | None, list[int]]] = {}
        for slot, adapter in enumerate(self.adapters):
            found.setdefault(id(adapter), (adapter, []))[1].append(slot)
        return list(found.values())


class Slots(Protocol):
    """What slots hold of the tokens that they have seen."""

    def rearrange(self, targets: list[int], sources: list[int], kept: list[int], end: int) -> None:
        """Slot `targets[i]` gets the first `kept[i]` positions of slot `sources[i]`, as they are before the call, and
        nothing else; `end` is the longest position that is touched."""


class Runner(Slots, Protocol):
    """Runs steps, over slots that it keeps."""

    @property
    def invariant(self) -> bool:
        """Whether a row's bits do not depend on its neighbours."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether a slot may take over the first positions of another one, and not only all of them."""

    @property
    def whole_prompts(self) -> bool:
        """Whether all tokens of a prompt but the last must come in one step."""

    @property
    def capacity(self) -> int:
        """Positions that a slot has room for."""

    def key_length(self, longest: int) -> int:
        """The `key_length` of a step whose longest position is `longest - 1`; it never falls as `longest` grows."""

    def grow(self, capacity: int, held: Sequence[int]) -> None:
        """Make room for `capacity` positions a slot; of slot `i` the first `held[i]` stay."""

    def step(self, weights: ModelWeights, batch: StepBatch) -> Tensor:
        """Float32 logits `[len(batch.sampled), vocab]`. The slots hold the batch's tokens afterwards."""


class ServedModel(Protocol):
    """A model as its folder's configuration describes it."""

    @property
    def family(self) -> str:
        """`model_type` of `config.json`."""

    @property
    def vocab(self) -> int:
        """Logits in a row."""

    @property
    def max_positions(self) -> int:
        """The most tokens of a prompt and its continuation together."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sample."""

    def load(self, folder: Path, dtype: torch.dtype) -> ModelWeights:
        """The weights in a folder, in memory of their own: it may be written anew while they are used. May be called
        in any thread while a step runs. Raises ModelFolderError where it holds none, or another model's."""

    @property
    def takes_adapters(self) -> bool:
        """Whether it was made for adapters."""

    def load_adapter(self, folder: Path, dtype: torch.dtype) -> LoadedAdapter:
        """The adapter in a folder, in PEFT's layout, in memory of its own. May be called in any thread while a step
        runs, after `load`. Raises ModelFolderError where it holds none that the model takes."""

    def runner(
        self, weights: ModelWeights, *, slots: int, prefill_tokens: int, context_length: int
    ) -> Runner:
        """A runner of `slots` slots, for steps of up to `prefill_tokens` rows beside theirs and samples of up to
        `context_length` tokens. `weights` are those of the first steps. Raises ModelFolderError for a model that
        cannot be served."""
