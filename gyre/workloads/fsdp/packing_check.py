"""How a model keeps the sequences of a pass apart, and whether what it says is right at all.

A model that does not keep them apart would train on wrong log-probs, and say nothing. So it is asked twice: a small
copy of it in float32 (`small_check`), which tells how its code computes; and the model itself, on its own weights,
device and precision, two drawn sequences together against each by itself, which tells of kernels. The same is asked of
sequences that have what they share computed once. What it cannot do is not done: see `choose`.

This module must not know about steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.errors import ConfigError
from gyre.workloads.fsdp.small_check import SmallCheckResult
from gyre.workloads.fsdp.token_model import TokenModel, Way
from gyre.workloads.learner.packing import positions_of

LENGTHS = (24, 17)
"""Longer than what convolutions of such models look back."""
FIRST_TOKENS = 8
"""Of the second sequence: those that see the first one most, where they see it."""
SHARED_TOKENS = 4
"""Of these, those that are shared: the others see them, and not what stands between."""

_SAID: dict[Way, str] = {
    "segments": "each attends to itself alone",
    "positions": "told apart by their position ids",
    "masks": "told apart by a mask for each type of layer",
}
_ONCE = "a prompt is computed once for its group"
_NOT_ONCE = "each sample has its own copy of its prompt"


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether sequences may share a pass, and in a sentence how it was found; and whether they may share tokens there
    (`prompts_once`)."""

    packs: bool
    said: str
    prompts_once: bool = False


def choose(
    model: TokenModel,
    tried: SmallCheckResult,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    any_rank: Callable[[bool], bool],
    prompts_once: bool = True,
) -> Packing:
    """Set the model so that its results are right: how it tells sequences apart, and not `selects` where its own logits
    are others. A call of all ranks, whose flag `any_rank` tells. Unless the result packs, a pass must be of one
    sequence. `tried` is what came of a small copy. Unless `prompts_once`, nobody asks for shared tokens. Raises
    ConfigError for a model that does not compute in `dtype`."""
    if not model.values:
        model.selects = not any_rank(not tried.selects)
    check = _Check(model, device, dtype, seed)
    model.take("alone")
    try:
        alone = check.alone()
    except Exception as error:  # its code may mix precisions
        raise ConfigError(
            f"{type(model.causal).__name__} of transformers does not compute in {str(dtype).removeprefix('torch.')}: "
            f"{' '.join(str(error).split())}",
            hint="Set config.fsdp.dtype to float32.",
        ) from error
    problem = tried.untried or f"of a small copy, beside other sequences, {[*tried.others.values(), ''][0]}"
    for way in _SAID:
        if any_rank(way not in tried.ways):
            continue
        difference = check.difference(way, alone)
        if not any_rank(difference > check.tolerance):
            said = f"sequences are packed, and {_SAID[way]}"
            if not prompts_once:
                return Packing(True, said)
            unshared = _why_not_once(check, way, tried, alone, any_rank)
            if not unshared:
                return Packing(True, f"{said}; {_ONCE}", prompts_once=True)
            return Packing(True, f"{said}; {_NOT_ONCE}: {unshared}")
        problem = (
            f"beside another one its hidden states differ by {difference:.2g} of their size, where "
            f"{check.tolerance:.2g} would be rounding"
        )
    model.take("alone")
    return Packing(False, f"each sequence is a pass of its own: {problem}")


def _why_not_once(
    check: _Check, way: Way, tried: SmallCheckResult, alone: Tensor, any_rank: Callable[[bool], bool]
) -> str:
    """Why sequences may not share tokens; "" where they may. A call of all ranks."""
    if way != "segments":  # the same on every rank
        return "in this way a token has no keys but those beside it in its own copy"
    if any_rank(bool(tried.unshared)):
        return f"of a small copy, {tried.unshared or 'on another rank, something differs'}"
    difference = check.difference_of_branches(alone)
    if any_rank(not difference <= check.tolerance):
        return (
            f"a branch's hidden states differ by {difference:.2g} of their size, where {check.tolerance:.2g} would be "
            "rounding"
        )
    return ""


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

    def alone(self) -> Tensor:
        """Hidden states of the second sequence's first tokens, by the model's own attention."""
        return self._said([self._rows[1]])[:FIRST_TOKENS]

    def difference(self, way: Way, alone: Tensor) -> float:
        """How far those of the sequences together are from those alone, as a part of their size."""
        self._model.take(way)
        start = len(self._rows[0])
        return _difference(self._said(self._rows)[start : start + FIRST_TOKENS], alone)

    def difference_of_branches(self, alone: Tensor) -> float:
        """The same where the second sequence is a branch beside the first one, after some tokens of its own that both
        go on after."""
        other, mine = self._rows
        parts = [mine[:SHARED_TOKENS], other, mine[SHARED_TOKENS:]]
        said = self._said(parts, (-1, 0, 0))
        branch = said[SHARED_TOKENS + len(other) :]
        return _difference(torch.cat([said[:SHARED_TOKENS], branch])[:FIRST_TOKENS], alone)

    def _said(self, rows: list[Tensor], parents: tuple[int, ...] = ()) -> Tensor:
        tokens, lengths = torch.cat(rows), [len(row) for row in rows]
        positions = np.concatenate(positions_of(lengths, parents or [-1] * len(rows)))
        with torch.no_grad():
            found: Tensor = self._model(
                tokens,
                torch.from_numpy(positions).to(self._device),
                torch.arange(len(tokens), device=self._device),
                tokens,
                lengths=lengths,
                parents=parents,
                says="hidden",
            )[0]
        return found.float()


def _difference(found: Tensor, alone: Tensor) -> float:
    difference = ((found - alone).norm(dim=-1) / alone.norm(dim=-1)).mean()
    return float(torch.nan_to_num(difference, nan=float("inf")))
