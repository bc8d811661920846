"""Gyre's passes as verl's batches: each pass is one micro-batch.

Invariants:
- *verl cuts nothing*: a batch is given with its own size as that of a micro-batch. verl cuts by tokens only where
  every rank has as many sequences as there are micro-batches, and by number lets ranks wait for each other for ever
  where they have unequal ones;
- *a share may be empty*: who has no pass while others have one computes a dummy, whose mask is 0.

This module must not know about models or ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils

from gyre.workloads.learner.packing import Pass


def batch_of(
    part: Pass, *, temperature: float, packed: bool, entropies: bool = False, counts: bool = True
) -> Any:
    """verl's TensorDict of a pass: whole sequences, their last token included, which Gyre's passes have as a target
    alone. With `counts` off, no token counts."""
    tokens, masks = [], []
    first = 0
    for row, (inputs, count) in enumerate(
        zip(part.tokens.split(part.lengths)[: len(part.counts)], part.counts, strict=True)
    ):
        last = part.targets[first + count - 1 : first + count]
        whole = torch.cat([inputs, last])
        mask = torch.zeros(len(whole), dtype=torch.int64)
        mask[part.columns[first : first + count] - sum(part.lengths[:row])] = int(counts)
        tokens.append(whole)
        masks.append(mask)
        first += count
    positions = [torch.arange(len(one)) for one in tokens]
    return tensordict_utils.get_tensordict(
        {"input_ids": _jagged(tokens), "position_ids": _jagged(positions), "loss_mask": _jagged(masks)},
        {
            "temperature": temperature,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(tokens),
            "use_remove_padding": packed,
            "use_fused_kernels": False,
            "calculate_entropy": entropies,
            "return_model_output": False,
        },
    )


def predicted(output: Tensor, part: Pass) -> Tensor:
    """Of a jagged output of verl's, which says at each token something of the next, what it says of the pass's
    predicted tokens: float32 `[n]`, one sequence after the other. Each sequence is a token longer than in the pass."""
    values: Tensor = output.values()
    return values[(part.columns + part.rows).to(values.device)].float()


def _jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
