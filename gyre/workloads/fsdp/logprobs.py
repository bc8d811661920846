"""Log-probs and entropies of tokens from hidden states, through an output layer, a few tokens at a time.

The logits of a whole pass never exist together: each piece's are made, used and dropped, and made again for the
gradient.

Invariants:
- *pieces do not matter*: whatever their size, the result is the same but for rounding;
- *float32 where it adds up*: logits are made float32, and the pieces' gradients of the output layer are summed so.

This module must not know about models or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 27
"""Elements of logits that exist at a time: 512 MiB in float32, and some copies of them."""

Head = Callable[[Tensor], Tensor]
"""Hidden states `[n, hidden]` to logits `[n, vocab]`."""


def head_logprobs(
    head: Head,
    parameters: Sequence[Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    scale: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, float32 `[n]`, of `softmax(head(hidden) * scale)` at `targets` int64 `[n]`. `parameters`
    are those of the head, and get a gradient unless they are frozen or no logit depends on them; the entropies carry
    one only where asked for."""
    found: tuple[Tensor, Tensor] = _HeadLogProbs.apply(  # type: ignore[no-untyped-call]
        head, hidden, targets, max(1, PIECE_ELEMENTS // vocab), scale, entropy_gradient, *parameters
    )
    return found


def logits_logprobs(
    logits: Tensor, targets: Tensor, *, scale: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The same of logits `[n, vocab]` that exist."""
    scaled = logits.float() * scale
    total = scaled.logsumexp(dim=-1)
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - total
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = total - ((scaled - total[:, None]).exp() * scaled).sum(dim=-1)
    return logprobs, entropies


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        hidden: Tensor,
        targets: Tensor,
        piece: int,
        scale: float,
        entropy_gradient: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = targets.shape[0]
        logprobs = torch.empty(count, device=hidden.device)
        entropies = torch.empty(count, device=hidden.device)
        for part in _pieces(count, piece):
            logprobs[part], entropies[part] = logits_logprobs(
                head(hidden[part]), targets[part], scale=scale, entropy_gradient=False
            )
        ctx.save_for_backward(hidden, targets)
        ctx.head, ctx.piece, ctx.scale, ctx.entropy_gradient = head, piece, scale, entropy_gradient
        ctx.parameters = parameters  # of the sharded model: they are filled again before this one's gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden)
        trained = [index for index, one in enumerate(ctx.parameters) if one.requires_grad]
        sums: list[Tensor | None] = [None for _ in ctx.parameters]
        for part in _pieces(targets.shape[0], ctx.piece):
            with torch.enable_grad():
                inputs = hidden[part].detach().requires_grad_()
                outputs = logits_logprobs(
                    ctx.head(inputs), targets[part], scale=ctx.scale, entropy_gradient=ctx.entropy_gradient
                )
            given = (by_logprob[part], by_entropy[part])
            used = 2 if ctx.entropy_gradient else 1
            by = [inputs, *(ctx.parameters[index] for index in trained)]
            gradients = torch.autograd.grad(outputs[:used], by, given[:used], allow_unused=True)
            by_hidden[part] = gradients[0]
            for index, gradient in zip(trained, gradients[1:], strict=True):
                if gradient is None:  # no logit depends on it, which `Backend.update` tells
                    continue
                held = sums[index]
                sums[index] = gradient.float() if held is None else held.add_(gradient)
        by_parameter = [
            None if found is None else found.to(parameter.dtype)
            for found, parameter in zip(sums, ctx.parameters, strict=True)
        ]
        return (None, by_hidden, None, None, None, None, *by_parameter)


def _pieces(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
