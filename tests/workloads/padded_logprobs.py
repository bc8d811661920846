"""Log-probs by a plain forward pass over padded rows: what packed passes, engines and back ends are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from gyre.models.modules import Decoder
from gyre.workloads.learner.padded import TokenBatch, token_logits


def token_logprobs(
    model: Decoder, batch: TokenBatch, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs float32 `[rows, t]` under `softmax(logits / temperature)` (at 1 when it is 0), and the entropies.

    Values where `batch.mask` is False are meaningless. The entropies carry a gradient only where asked for.
    """
    logits = token_logits(model, batch)
    everything = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    counted = everything if entropy_gradient else everything.detach()
    entropies = -(counted.exp() * counted).sum(dim=-1)
    return everything.gather(2, batch.targets[:, :, None])[:, :, 0], entropies
