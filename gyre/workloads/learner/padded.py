"""Rows as padded tensors, and the logits that predict their tokens: what the warm start reads.

This module must not know about advantages, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.models.modules import Decoder


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sequence: its prompt int32 `[p]` and the tokens int32 `[t]` that followed it. `mask`, bool `[t]`, says which
    of these count; None for all."""

    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows padded on the right. `inputs` int64 `[rows, width]`; `targets` and `mask` (bool) `[rows, t]`;
    `columns` int64 `[rows, t]` is the input whose logits predict each target."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    columns: Tensor


def pad_rows(rows: Sequence[TokenRow]) -> TokenBatch:
    """Raises ValueError for a row without a prompt or without tokens, or where there are no rows."""
    if not rows or any(len(row.prompt_ids) == 0 or len(row.token_ids) == 0 for row in rows):
        raise ValueError("log-probs need rows with at least one prompt token and one sampled token")
    width = max(len(row.prompt_ids) + len(row.token_ids) for row in rows) - 1
    longest = max(len(row.token_ids) for row in rows)
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    targets = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=bool)
    columns = np.zeros((len(rows), longest), dtype=np.int64)
    for index, row in enumerate(rows):
        start, count = len(row.prompt_ids), len(row.token_ids)
        inputs[index, :start] = row.prompt_ids
        inputs[index, start : start + count - 1] = row.token_ids[:-1]
        targets[index, :count] = row.token_ids
        mask[index, :count] = True if row.mask is None else row.mask
        columns[index, :count] = np.arange(start - 1, start - 1 + count)
    return TokenBatch(*(torch.from_numpy(array) for array in (inputs, targets, mask, columns)))


def token_logits(model: Decoder, batch: TokenBatch) -> Tensor:
    """The logits that predict each target, float32 `[rows, t, vocab]`."""
    logits: Tensor = model(batch.inputs)
    return logits.gather(1, batch.columns[:, :, None].expand(-1, -1, logits.shape[-1]))
