"""What an engine of SGLang has on each of its devices: weights, and the KV memory of a token.

This module must not import torch, nor know of jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre.models.architecture import Architecture
from gyre.workloads.memory.parameters import parameters_of

WIDTH = 2
"""Bytes of a number: the engine's weights and its KV memory are of 16 bits unless its arguments say otherwise."""

_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
_FRACTION = "--mem-fraction-static"
_OTHERWISE = ("--dtype", "--quantization", "--kv-cache-dtype")


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Bytes on one device. `fraction` of the device is for weights and KV memory together; None where the arguments do
    not say, and SGLang chooses."""

    weights: int
    by_token: int
    fraction: float | None

    def tokens(self, device_bytes: int) -> int | None:
        """Tokens whose keys and values have room; None where it is not known."""
        if self.fraction is None:
            return None
        return max(0, int((self.fraction * device_bytes - self.weights) // self.by_token))


def engine_need(shape: Architecture, arguments: Sequence[str]) -> EngineNeed | None:
    """By the engine's further arguments. None where these change how wide its numbers are, or cannot be read."""
    given = _options(arguments)
    if any(name in given for name in _OTHERWISE):
        return None
    try:
        share = int(next((given[name] for name in _PARALLEL if name in given), "1"))
        fraction = float(given[_FRACTION]) if _FRACTION in given else None
    except ValueError:
        return None
    share = max(1, share)
    weights = WIDTH * parameters_of(shape).total // share
    keys = max(1, shape.kv_heads // share) * shape.head_dim
    return EngineNeed(weights, 2 * WIDTH * shape.layers * keys, fraction)


def _options(arguments: Sequence[str]) -> dict[str, str]:
    found = {}
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name] = value if equals else (arguments[at + 1] if at + 1 < len(arguments) else "")
    return found
