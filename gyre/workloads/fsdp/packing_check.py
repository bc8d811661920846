"""Whether a model keeps the sequences of a pass apart: two drawn ones together, against each by itself.

A model that does not would train on wrong log-probs, and say nothing. So it is asked once, on its own weights, device
and precision, and what it cannot do is not done: see `choose`.

This module must not know about steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.workloads.fsdp.token_model import Says, TokenModel

LENGTHS = (24, 17)
"""Longer than what convolutions of such models look back."""
FIRST_TOKENS = 8
"""Of the second sequence: those that see the first one most, where they see it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether sequences may share a pass, and in a sentence how it was found."""

    packs: bool
    said: str


def choose(
    model: TokenModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    any_rank: Callable[[bool], bool],
) -> Packing:
    """Set the model so that its results are right: `own_masks` where that makes it keep sequences apart, and not
    `selects` where its own logits are others. A call of all ranks, whose flag `any_rank` tells. Unless the result
    packs, a pass must be of one sequence."""
    check = _Check(model, device, dtype, seed)
    if model.attends_by_segments:
        try:
            apart = check.packed_difference() <= check.tolerance
        except (
            TypeError,
            ValueError,
        ):  # it does not pass on what is needed, or attends in a way that is not known
            apart = False
        if any_rank(not apart):
            model.attend_otherwise()
    if not model.values and any_rank(check.output_layer_difference() > check.tolerance):
        model.selects = False
    difference = check.packed_difference()
    if not any_rank(difference > check.tolerance):
        how = (
            "each attends to itself alone"
            if model.attends_by_segments
            else "told apart by their position ids"
        )
        return Packing(True, f"sequences are packed, and {how}")
    model.own_masks = True
    try:
        masked = check.packed_difference()
    except (TypeError, AttributeError, ValueError, KeyError):  # it takes no masks by types of layers
        masked = float("inf")
    if not any_rank(masked > check.tolerance):
        return Packing(True, "sequences are packed, and told apart by a mask for each type of layer")
    model.own_masks = False
    return Packing(
        False,
        f"each sequence is a pass of its own: beside another one its hidden states differ by {difference:.2g} of their "
        f"size, where {check.tolerance:.2g} would be rounding",
    )


class _Check:
    def __init__(self, model: TokenModel, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._model = model
        self._device = device
        self.tolerance = float(torch.finfo(dtype).eps) ** 0.5
        """A relative difference: half of the digits."""
        generator = torch.Generator().manual_seed(seed)  # the same tokens on every rank
        self._rows = [
            torch.randint(0, model.vocab, (length,), generator=generator).to(device) for length in LENGTHS
        ]

    def attends_as_itself(self) -> bool:
        """Whether a pass by `packed_attention` is what the model's own attention makes of a sequence alone."""
        self._model.attend_otherwise()
        alone = self._alone()
        self._model.attend_by_segments()
        try:
            return bool(self.packed_difference(alone) <= self.tolerance)
        except (TypeError, ValueError):  # the model does not pass on the segments
            return False

    def _alone(self) -> Tensor:
        return self._said([self._rows[1]], "hidden")[:FIRST_TOKENS].float()

    def packed_difference(self, alone: Tensor | None = None) -> float:
        """Of the first tokens of the second sequence: how far their hidden states are from those of the sequence
        alone, as a part of their size."""
        alone = self._alone() if alone is None else alone
        start = len(self._rows[0])
        packed = self._said(self._rows, "hidden")[start : start + FIRST_TOKENS].float()
        differences = (packed - alone).norm(dim=-1) / alone.norm(dim=-1)
        return _finite(differences.mean())

    def output_layer_difference(self) -> float:
        """Between log-probs with and without selected hidden states, as a part of their spread."""
        mine = self._said([self._rows[0]], "tokens")
        wanted = self._said([self._rows[0]], "tokens by all logits")
        return _finite((mine - wanted).norm() / wanted.norm())

    def _said(self, rows: list[Tensor], says: Says) -> Tensor:
        tokens = torch.cat(rows)
        positions = torch.cat([torch.arange(len(row), device=self._device) for row in rows])
        with torch.no_grad():
            found: Tensor = self._model(
                tokens,
                positions,
                torch.arange(len(tokens), device=self._device),
                tokens,
                lengths=[len(row) for row in rows],
                says=says,
            )[0]
        return found


def _finite(value: Tensor) -> float:
    """Not a number is as different as can be."""
    return float(torch.nan_to_num(value, nan=float("inf")))
