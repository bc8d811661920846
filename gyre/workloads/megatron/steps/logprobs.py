"""Log-probs and entropies from logits whose vocabulary is split over the tensor-parallel ranks.

Invariants:
- *no gathered logits*: ranks exchange three numbers a token, forwards, and nothing backwards;
- *float32 maths*: whatever the logits' dtype; a block of tokens at a time, so that no float32 copy of them is made;
- *the logits stay*: they are read, not written.

Padded columns of the vocabulary have no probability. This module must not know about models or losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 25
"""Elements of logits that are made float32 at a time: 128 MiB."""


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    rows: Tensor | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, float32 `[n]`, of `softmax(logits / temperature)` at `targets` int64 `[n]`.

    `logits` `[tokens, columns]` are this rank's columns of the padded vocabulary, in the order of the ranks of `group`
    (None: all columns are here); `vocab` is how many columns there truly are. `rows` int64 `[n]` says which row of the
    logits predicts each target, each row at most once; None takes them one by one. At `temperature` 0 the scale is 1.
    The entropies carry a gradient only where asked for. Every rank of the group gets the same values.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    found: tuple[Tensor, Tensor] = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits, targets, rows, vocab, scale, group, entropy_gradient
    )
    return found


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        rows: Tensor | None,
        vocab: int,
        scale: float,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        first = dist.get_rank(group) * logits.shape[1] if group is not None else 0
        here = max(0, min(logits.shape[1], vocab - first))
        columns = targets - first
        mine = (columns >= 0) & (columns < here)
        columns = torch.where(mine, columns, 0)
        count = targets.shape[0]

        top = torch.full((count,), float("-inf"), device=logits.device)
        for part in _blocks(count, here):
            top[part] = _scaled(logits, rows, part, here, scale).amax(dim=1)
        _reduce(top, dist.ReduceOp.MAX, group)

        # The sum of exponentials, the sum of them times their logits, and the target's logit.
        sums = torch.zeros((3, count), device=logits.device)
        for part in _blocks(count, here):
            shifted = _scaled(logits, rows, part, here, scale).sub_(top[part, None])
            picked = shifted.gather(1, columns[part, None])[:, 0]
            sums[2, part] = torch.where(mine[part], picked, 0.0)
            weights = shifted.exp()
            sums[0, part] = weights.sum(dim=1)
            sums[1, part] = weights.mul_(shifted).sum(dim=1)
        _reduce(sums, dist.ReduceOp.SUM, group)
        total = sums[0].log()
        logprobs = sums[2] - total
        entropies = total - sums[1] / sums[0]

        ctx.save_for_backward(logits, rows, top + total, entropies, columns, mine)
        ctx.here, ctx.scale = here, scale
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.entropy_gradient = entropy_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, normaliser, entropies, columns, mine = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        gradient = torch.zeros_like(logits)
        count = normaliser.shape[0]
        for part in _blocks(count, ctx.here):
            log_p = _scaled(logits, rows, part, ctx.here, ctx.scale).sub_(normaliser[part, None])
            p = log_p.exp()
            # d logp[target] / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
            pull = -by_logprob[part, None] * p
            if ctx.entropy_gradient:
                pull -= by_entropy[part, None] * p * (log_p + entropies[part, None])
            at = columns[part, None]
            onto_target = torch.where(mine[part], by_logprob[part], 0.0)[:, None]
            pull.scatter_(1, at, pull.gather(1, at) + onto_target)
            pull *= ctx.scale
            if rows is None:
                gradient[part, : ctx.here] = pull.to(gradient.dtype)
            else:
                gradient[:, : ctx.here].index_copy_(0, rows[part], pull.to(gradient.dtype))
        return gradient, None, None, None, None, None, None


def _scaled(logits: Tensor, rows: Tensor | None, part: slice, here: int, scale: float) -> Tensor:
    """A float32 copy of some rows' true columns, times `scale`."""
    chosen = logits[part, :here] if rows is None else logits[rows[part], :here]
    return chosen.to(torch.float32, copy=True).mul_(scale)


def _blocks(count: int, columns: int) -> list[slice]:
    """None where there is nothing here: a rank may hold padding only."""
    if not columns:
        return []
    size = max(1, _BLOCK_ELEMENTS // columns)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _reduce(values: Tensor, how: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=how, group=group)
