"""How the next token is drawn, and its log-prob.

Invariants:
- *own dice*: the number that decides the token at absolute position `p` of prompt and output together depends on
  `(sampling_seed, p)` alone;
- *what was sampled is what is reported*: a log-prob is that of `softmax(logits / temperature)`, before top-k, top-p
  and min-p cut it (SGLang's meaning). Greedy decoding (`temperature` 0) reports it at temperature 1;
- *row by row*: a row's token and log-prob do not depend on the other rows.

This module must not know about slots or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.philox import uniforms

_KEY = 0x67797265
_STREAM = 17


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request's `sampling_params`, checked. `temperature` 0 is greedy, `top_k` 0 is off."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def cuts(self) -> bool:
        """Whether only a part of the distribution is drawn from."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


def dice(seeds: Sequence[int], starts: Sequence[int], count: int) -> list[list[float]]:
    """For each seed, the numbers in [0, 1) that decide the tokens at positions `start` to `start + count`."""
    positions = np.array(starts)[:, None] + np.arange(count)
    numbers: list[list[float]] = uniforms(_KEY, _STREAM, np.array(seeds)[:, None], positions, 0).tolist()
    return numbers


def choose(
    logits: Tensor,
    sampling: Sequence[Sampling],
    thrown: Sequence[float],
    forbidden: Sequence[tuple[int, Sequence[int]]] = (),
) -> tuple[list[int], list[float]]:
    """A token and its log-prob for each row of float32 `logits` `[rows, vocab]`.

    Drawn by inversion of the distribution, in float64. `forbidden`: rows with the tokens that they must not draw.
    Logits that are not finite give log-probs that are not.
    """
    for row, tokens in forbidden:
        logits[row, torch.tensor(tokens)] = float("-inf")
    temperatures = [s.temperature or 1.0 for s in sampling]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    greedy = [s.temperature == 0 for s in sampling]
    if all(greedy):
        chosen = logits.argmax(dim=-1)
    else:
        weights = logprobs.double().exp_()
        cutting = [row for row, s in enumerate(sampling) if s.cuts]
        if cutting:
            weights[cutting] = _cut(weights[cutting], [sampling[row] for row in cutting])
        cumulative = weights.cumsum(dim=-1)
        thresholds = torch.tensor(thrown, dtype=torch.float64)[:, None] * cumulative[:, -1:]
        # The first token whose cumulative weight exceeds the threshold; never one of weight zero.
        chosen = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
        chosen = chosen.clamp_(max=logits.shape[-1] - 1)
        if any(greedy):
            chosen = torch.where(torch.tensor(greedy), logits.argmax(dim=-1), chosen)
    return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist()


def _cut(weights: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Zero for what top-k, top-p and min-p leave out, in SGLang's order; ties go to the smaller token id."""
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    vocab = weights.shape[-1]
    top_k = torch.tensor([s.top_k or vocab for s in sampling])[:, None]
    top_p = torch.tensor([s.top_p for s in sampling], dtype=torch.float64)[:, None]
    min_p = torch.tensor([s.min_p for s in sampling], dtype=torch.float64)[:, None]
    before = ordered.cumsum(dim=-1) - ordered
    left_out = (
        (torch.arange(vocab) >= top_k)
        | ((before > top_p) & (top_p < 1.0))
        | (ordered < min_p * ordered[:, :1])
    )
    return torch.zeros_like(weights).scatter_(1, tokens, ordered.masked_fill(left_out, 0.0))
