"""How many floating-point operations a decoder's tokens take, by the content of its `config.json`: the numerator of
MFU.

A matrix of `n` numbers takes 2n operations a token forward, and twice that backward (Kaplan et al. 2020, "Scaling Laws
for Neural Language Models", 2.1). Attention takes, in each layer, `4 · heads · head_dim` operations for each key that a
query attends to (Chowdhery et al. 2022, "PaLM", appendix B, which counts every key of the sequence; here they are those
that causal attention and a sliding window leave). The embedding is a look-up, and takes none; the output layer is
counted for the tokens that predict; of experts those are counted that a token goes through. What is computed again for
want of memory is no operation of the model (PaLM, 4.1: model FLOPs, not hardware FLOPs), nor are norms, rotations and
softmax.

Invariant *known or none*: of a kind of model that is not in `FAMILIES` nothing is said, for its matrices may be others.

This module must not import torch, nor know what computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of `model_type` whose layers are gated units and attention by heads, with experts or without."""

_ALWAYS_SLIDE = ("mistral", "mixtral")
"""Whose `sliding_window` holds for every layer, unless it is null."""

FORWARD, BACKWARD, BACKWARD_FROZEN = 1, 2, 1
"""How often the operations of a matrix are made: backward once for its input's gradient, once for its own, which a
frozen one has not."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of the forward pass: of one token's matrices in all layers, of one prediction of the output layer, and
    of one key that one query attends to in one layer. `windows` has of each layer how many keys a query has at most,
    None where it has all before it."""

    token: int
    prediction: int
    key: int
    windows: tuple[int | None, ...]

    def forward(self, positions: NDArray[np.int64], predicted: int) -> int:
        """Of tokens at these places of their sequences, of which so many predict."""
        return self._matrices(len(positions), predicted) + self._attention(positions)

    def training(self, positions: NDArray[np.int64], predicted: int, *, frozen: bool = False) -> int:
        """Forward and backward. With `frozen` the matrices have no gradient of their own, as beside an adapter, whose
        few operations are left out."""
        matrices = FORWARD + (BACKWARD_FROZEN if frozen else BACKWARD)
        return matrices * self._matrices(len(positions), predicted) + (FORWARD + BACKWARD) * self._attention(
            positions
        )

    def _matrices(self, tokens: int, predicted: int) -> int:
        return self.token * tokens + self.prediction * predicted

    def _attention(self, positions: NDArray[np.int64]) -> int:
        keys = 0
        for window in set(self.windows):
            seen = positions + 1 if window is None else np.minimum(positions + 1, window)
            keys += self.windows.count(window) * int(seen.sum())
        return self.key * keys


def flops_of(config: Mapping[str, Any], *, values: bool = False) -> ModelFlops | None:
    """By the content of a `config.json`; with `values` the output layer is a value head. None where it is not known."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return None
    try:
        return _flops(str(family), config, values)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a key that is not there, or is no number
        return None


def _flops(family: str, config: Mapping[str, Any], values: bool) -> ModelFlops:
    hidden, heads, layers = (
        int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(
        config["head_dim"] if family.startswith("qwen3") else config.get("head_dim") or hidden // heads
    )
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)  # queries and the output; keys and values
    units = sum(_units(family, config, hidden, layer) for layer in range(layers))
    return ModelFlops(
        token=2 * (layers * attention + units),
        prediction=2 * hidden * (1 if values else int(config["vocab_size"])),
        key=4 * heads * head_dim,
        windows=tuple(_window(family, config, layer) for layer in range(layers)),
    )


def _units(family: str, config: Mapping[str, Any], hidden: int, layer: int) -> int:
    """Numbers of a layer's gated units that a token goes through, its router among them."""
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe") or not experts or not _is_sparse(config, layer):
        return 3 * hidden * int(config["intermediate_size"])
    width = int(config["intermediate_size"] if family == "mixtral" else config["moe_intermediate_size"])
    found = hidden * experts + 3 * hidden * width * int(config["num_experts_per_tok"])
    if family == "qwen2_moe":  # an expert that every token goes through, and its gate
        found += 3 * hidden * int(config["shared_expert_intermediate_size"]) + hidden
    return found


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    each = int(config.get("decoder_sparse_step") or 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % each == 0


def _window(family: str, config: Mapping[str, Any], layer: int) -> int | None:
    window = config.get("sliding_window")
    if not window:
        return None
    if family in _ALWAYS_SLIDE:
        return int(window)
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    slides = kinds[layer] == "sliding_attention" if kinds else layer >= int(config["max_window_layers"])
    return int(window) if slides else None
