"""Samples as packed passes: sequences side by side in one row of tokens, with what the loss needs of each token.

Invariants:
- *whole sequences*: a sequence is in one pass, so what is normalised by its length can be;
- *the same on every rank of a replica*: a function of the samples and the settings alone.

This module must not know about models or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt int32 `[p]`, the tokens int32 `[t]` that followed it, and values by name, float32 `[t]` each."""

    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    tag: tuple[int, int] | None = None
    """A group's id, and the number of the sample in it."""

    @property
    def length(self) -> int:
        """Inputs: the last token is predicted, not read."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes through the model at once.

    `tokens`, `positions` int64 `[width]`; `lengths` of the sequences in it, padding included as one of its own.
    Per predicted token, `[n]`: `columns` (which input predicts it), `targets`, `rows` (which sequence it is of), all
    int64, and `values` by name, float32.
    """

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    columns: Tensor
    targets: Tensor
    rows: Tensor
    values: dict[str, Tensor]
    tags: Sequence[tuple[int, int] | None] = ()
    """Of each sequence but padding, whose it is."""
    counts: Sequence[int] = ()
    """How many predicted tokens each has."""

    def to(self, device: torch.device) -> Pass:
        """On the device; the host does not wait for it. A copy from pageable memory would wait for all that the device
        has to do before."""

        def moved(tensor: Tensor) -> Tensor:
            return on_device(tensor, device)

        return Pass(
            moved(self.tokens),
            moved(self.positions),
            self.lengths,
            moved(self.columns),
            moved(self.targets),
            moved(self.rows),
            {name: moved(value) for name, value in self.values.items()},
            self.tags,
            self.counts,
        )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor in host memory, made in the order of the device's work: the host goes on at once."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pack(rows: Sequence[Row], *, max_tokens: int, multiple: int = 1) -> Iterator[Pass]:
    """Passes of at most `max_tokens` inputs, in the order of the rows; a longer row is a pass of its own. The width of
    each is a multiple of `multiple`. Raises ValueError for a row without a prompt or without tokens."""
    for some in _together(rows, max_tokens):
        yield _packed(some, multiple)


def pack_all_but_rest(
    rows: Sequence[Row], *, max_tokens: int, multiple: int = 1, least_tokens: int
) -> tuple[list[Pass], list[Row]]:
    """As `pack`, but the rows of a last pass of fewer than `least_tokens` inputs are returned as they are."""
    parts = list(_together(rows, max_tokens))
    rest = parts.pop() if parts and sum(row.length for row in parts[-1]) < least_tokens else []
    return [_packed(some, multiple) for some in parts], rest


def _together(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """The rows of each pass."""
    held: list[Row] = []
    width = 0
    for row in rows:
        if len(row.prompt_ids) == 0 or len(row.token_ids) == 0:
            raise ValueError("log-probs need rows with at least one prompt token and one sampled token")
        if held and width + row.length > max_tokens:
            yield held
            held, width = [], 0
        held.append(row)
        width += row.length
    if held:
        yield held


def _packed(rows: Sequence[Row], multiple: int) -> Pass:
    lengths = [row.length for row in rows]
    padding = -sum(lengths) % multiple
    starts = np.cumsum([0, *lengths[:-1]])
    inputs = [np.concatenate([row.prompt_ids, row.token_ids[:-1]]) for row in rows]
    columns = [
        np.arange(len(row.token_ids)) + (start + len(row.prompt_ids) - 1)
        for row, start in zip(rows, starts, strict=True)
    ]
    if padding:
        lengths.append(padding)
        inputs.append(np.zeros(padding, dtype=np.int32))

    def joined(parts: Sequence[NDArray[np.generic]], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    return Pass(
        tokens=joined(inputs, np.int64),
        positions=joined([np.arange(length) for length in lengths], np.int64),
        lengths=lengths,
        columns=joined(columns, np.int64),
        targets=joined([row.token_ids for row in rows], np.int64),
        rows=torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor([len(row.token_ids) for row in rows])
        ),
        values={name: joined([row.values[name] for row in rows], np.float32) for name in rows[0].values},
        tags=[row.tag for row in rows],
        counts=[len(row.token_ids) for row in rows],
    )
