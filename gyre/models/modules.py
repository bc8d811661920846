"""The decoder as torch modules that are trained: as a language model, and with a value head.

Parameters have the decoder's own names, which checkpoints and digests hold (`gyre.models.tensor_names`). This module
must not know about tasks, sampling, losses or Gyre's workloads.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre.models.architecture import Architecture
from gyre.models.decoder import DecoderWeights, hidden_states, last_norm, rotary_table


class Decoder(nn.Module):
    """The language model, in float32. Weights are drawn from a generator of their own, seeded with `seed`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.embed = nn.Embedding(a.vocab, a.hidden)
        self.blocks = nn.ModuleList(_Block(architecture) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.hidden)
        self.head = None if a.tied else nn.Linear(a.hidden, a.vocab, bias=False)
        cos, sin = rotary_table(a, a.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        depth_scale = 1.0 / math.sqrt(2 * self.architecture.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            scale = depth_scale if name.endswith(("out.weight", "down.weight")) else 1.0
            nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]), generator=generator)

    def weights(self) -> DecoderWeights:
        """The parameters as the forward pass takes them."""
        return DecoderWeights.of(dict(self.named_parameters()), self.architecture)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits float32 `[rows, length, vocab]` of int64 `tokens` `[rows, length]`; see `hidden`."""
        weights = self.weights()
        return F.linear(self._hidden(weights, tokens), weights.head)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The hidden states that logits are made from, float32 `[rows, length, hidden]`; attention is causal. Raises
        IndexError for more tokens than `max_positions`."""
        return self._hidden(self.weights(), tokens)

    def _hidden(self, weights: DecoderWeights, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.architecture.max_positions:
            raise IndexError(f"{length} tokens exceed max_positions={self.architecture.max_positions}")
        rotary = self.cos[:length, None], self.sin[:length, None]
        x = hidden_states(self.architecture, weights, tokens, rotary, _causal)
        return last_norm(self.architecture, weights, x)


class ValueModel(nn.Module):
    """The decoder with one number instead of logits: what return is expected after the tokens so far.

    The head begins at zero, so that the first values are 0, unless it is set to something else.
    """

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        # Tied embeddings leave no head of the decoder's own, which nothing would train.
        self.decoder = Decoder(replace(architecture, tied=True), seed=seed)
        self.value_head = nn.Linear(architecture.hidden, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Values float32 `[rows, length]` of int64 `tokens` `[rows, length]`, attention causal."""
        values: Tensor = self.value_head(self.decoder.hidden(tokens))[:, :, 0]
        return values


class _Attention(nn.Module):
    """Holds parameters; `hidden_states` computes."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.qkv = nn.Linear(a.hidden, width + 2 * kv_width, bias=a.qkv_bias)
        self.out = nn.Linear(width, a.hidden, bias=a.out_bias)
        if a.qk_norm:
            self.q_norm = nn.RMSNorm(a.head_dim)
            self.k_norm = nn.RMSNorm(a.head_dim)


class _Block(nn.Module):
    """Holds parameters; `hidden_states` computes."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(a.hidden)
        self.attention = _Attention(a)
        self.mlp_norm = nn.RMSNorm(a.hidden)
        self.gate_up = nn.Linear(a.hidden, 2 * a.mlp, bias=a.mlp_bias)
        self.down = nn.Linear(a.mlp, a.hidden, bias=a.mlp_bias)


def _causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each row's tokens, `[rows, length, heads, d]`, to those before them and themselves."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)
