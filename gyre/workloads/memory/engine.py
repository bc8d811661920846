"""What an engine has on each of its devices: weights, and the KV memory of a token.

This module must not import torch, nor know of jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre.engines.kind import MemoryWords
from gyre.models.architecture import Architecture
from gyre.workloads.memory.parameters import parameters_of

WIDTH = 2
"""Bytes of a number: the engine's weights and its KV memory are of 16 bits unless its arguments say otherwise."""


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Bytes on one device. `fraction` of the device is for weights and KV memory together; None where the arguments do
    not say, and the engine chooses."""

    weights: int
    by_token: int
    fraction: float | None

    def tokens(self, device_bytes: int) -> int | None:
        """Tokens whose keys and values have room; None where it is not known."""
        if self.fraction is None:
            return None
        return max(0, int((self.fraction * device_bytes - self.weights) // self.by_token))


def engine_need(
    shape: Architecture, arguments: Sequence[str], words: MemoryWords | None
) -> EngineNeed | None:
    """By the engine's further arguments, which `words` names. None where these change how wide its numbers are, or
    cannot be read, and of an engine whose memory is not foretold."""
    given = _options(arguments)
    if words is None or any(name in given for name in words.otherwise):
        return None
    try:
        share = int(next((given[name] for name in words.parallel if name in given), "1"))
        fraction = float(given[words.fraction]) if words.fraction in given else None
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
