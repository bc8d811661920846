"""Batched sampling with a static key-value cache.

Invariants:
- *own dice*: the number that decides a token depends only on `(seed, group id, sample index, token position)`;
- *what was sampled is what is reported*: log-probs are those of the distribution that the token was drawn from,
  the softmax of `logits / temperature`. Greedy decoding (`temperature` 0) reports them at temperature 1;
- *repeatable*: the same weights and the same rows in one call give the same bits.

Rows that ended are taken out of the batch, so they cost nothing. This module must not know about versions,
rewards or workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.models.modules import Decoder, KVCache
from gyre.philox import uniforms

_STREAM_TOKEN = 16
_COMPACT_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to continue: `id` of its group, int32 `[p]` tokens with `p` ≥ 1."""

    id: int
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Completion:
    """int32 `[t]` tokens (the end token included) with float32 `[t]` log-probs; `stop` or `length`."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Prompt],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    eos_id: int,
    seed: int,
    on_token: Callable[[], None] = lambda: None,
) -> list[list[Completion]]:
    """`n` completions of each prompt, in the prompts' order. `temperature` 0 takes the likeliest token.

    `on_token` is called after every decoding step. Raises ValueError for an empty prompt and IndexError when
    prompt and completion exceed the model's positions.
    """
    if not prompts:
        return []
    if any(len(prompt.token_ids) == 0 for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + max_new_tokens > model.architecture.max_positions:
        raise IndexError(
            f"{longest} prompt tokens and {max_new_tokens} new ones exceed "
            f"max_positions={model.architecture.max_positions}"
        )
    cache = KVCache(model.architecture, len(prompts), longest + max_new_tokens)
    logits, pads = _prefill(model, prompts, longest, cache)

    rows = torch.arange(len(prompts)).repeat_interleave(n)
    if n > 1:
        cache.select(rows)
        logits, pads = logits[rows], pads[rows]
    count = len(rows)
    group_ids = np.array([prompt.id for prompt in prompts], dtype=np.int64).repeat(n)
    sample_ids = np.tile(np.arange(n), len(prompts))
    tokens = np.zeros((count, max_new_tokens), dtype=np.int32)
    logprobs = np.zeros((count, max_new_tokens), dtype=np.float32)
    lengths = np.full(count, max_new_tokens)
    stopped = np.zeros(count, dtype=bool)

    live = np.arange(count)  # which output row each row of the batch is
    for position in range(max_new_tokens):
        dice = uniforms(seed, _STREAM_TOKEN, group_ids[live], sample_ids[live], position)
        chosen, chosen_logprobs = _choose(logits, temperature, dice)
        open_rows = ~stopped[live]
        at = live[open_rows]
        tokens[at, position] = chosen.numpy()[open_rows]
        logprobs[at, position] = chosen_logprobs.numpy()[open_rows]
        ended = at[tokens[at, position] == eos_id]
        stopped[ended] = True
        lengths[ended] = position + 1
        on_token()
        keep = np.flatnonzero(~stopped[live])
        if len(keep) == 0 or position + 1 == max_new_tokens:
            break
        if len(keep) <= _COMPACT_BELOW * len(live):
            kept = torch.from_numpy(keep)
            cache.select(kept)
            chosen, pads, live = chosen[kept], pads[kept], live[keep]
        logits = _decode(model, chosen, pads, cache)

    completions = [
        Completion(
            token_ids=tokens[row, : lengths[row]].copy(),
            logprobs=logprobs[row, : lengths[row]].copy(),
            finish_reason="stop" if stopped[row] else "length",
        )
        for row in range(count)
    ]
    return [completions[start : start + n] for start in range(0, count, n)]


def _prefill(
    model: Decoder, prompts: Sequence[Prompt], longest: int, cache: KVCache
) -> tuple[Tensor, Tensor]:
    """Logits `[rows, vocab]` after each prompt, and int64 `[rows]` how many pads stand left of it."""
    pads = torch.tensor([longest - len(prompt.token_ids) for prompt in prompts])
    tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt.token_ids) :] = torch.from_numpy(
            prompt.token_ids.copy()
        )  # may be a read-only view
    columns = torch.arange(longest)
    causal = columns[None, :] <= columns[:, None]
    # A pad attends to itself, so that no row of the softmax is empty; nothing attends to a pad.
    visible = (columns[None, None, :] >= pads[:, None, None]) & causal | torch.eye(longest, dtype=torch.bool)
    positions = (columns[None, :] - pads[:, None]).clamp(min=0)
    logits = model(tokens, positions=positions, mask=visible[:, None], cache=cache)
    return logits[:, -1], pads


def _decode(model: Decoder, chosen: Tensor, pads: Tensor, cache: KVCache) -> Tensor:
    """Logits `[rows, vocab]` after one more token a row."""
    columns = torch.arange(cache.length + 1)
    visible = columns[None, :] >= pads[:, None]
    positions = (cache.length - pads)[:, None]
    logits: Tensor = model(chosen[:, None], positions=positions, mask=visible[:, None, None], cache=cache)
    return logits[:, -1]


def _choose(logits: Tensor, temperature: float, dice: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """The tokens int64 `[rows]` and their log-probs float32 `[rows]`; by inversion of the distribution."""
    scaled = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        cumulative = scaled.double().exp().cumsum(dim=-1)
        thresholds = torch.from_numpy(dice)[:, None] * cumulative[:, -1:]
        chosen = (cumulative <= thresholds).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
    else:
        chosen = scaled.argmax(dim=-1)
    return chosen, scaled.gather(1, chosen[:, None])[:, 0]
