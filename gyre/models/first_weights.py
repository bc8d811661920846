"""The weights that training begins with: a folder's safetensors, or tensors drawn from a seed.

Each source gives whole tensors by their Hugging Face names, and only those that it is asked for: a rank reads what it
holds a piece of.

Invariants:
- *all of it or none*: a folder's tensors are compared with its `config.json` before the first one is read, on every
  rank: all ranks fail together with the same error, and nobody waits for others;
- *never drawn by mistake*: weights are drawn from the seed only where a folder holds none of any kind.

This module must not know about ranks or layouts.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from gyre.models.architecture import Architecture
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import refuse_other_formats
from gyre.models.safetensors_folder import SafetensorsFolder, TensorSource
from gyre.models.tensor_names import HEAD, SCORE, VALUE_BIAS, VALUE_WEIGHT, expected_shapes


def first_weights(
    folder: Path, architecture: Architecture, seed: int, device: torch.device, *, head: bool = True
) -> SafetensorsFolder | SeededWeights:
    """The folder's weights; where it holds none, those that the seed gives. Without `head` its output layer is not
    used, and may be absent or another model's.

    Raises ModelFolderError where they cannot be read or are not those of the architecture.
    """
    found = SafetensorsFolder(folder)
    if found:
        found.require(architecture, head=HEAD if head else None)
        return found
    refuse_other_formats(folder)
    return SeededWeights(architecture, seed, device)


def given_weights(folder: Path, architecture: Architecture, *, head: bool = True) -> SafetensorsFolder:
    """The weights of a folder that must hold some; without `head` as `first_weights`.

    Raises ModelFolderError where there are none, or they cannot be read or are not those of the architecture.
    """
    found = SafetensorsFolder(folder)
    if not found:
        raise ModelFolderError(
            f"{folder} holds no weights as safetensors.",
            hint="Save the model with transformers' save_pretrained, which writes safetensors.",
        )
    found.require(architecture, head=HEAD if head else None)
    return found


def score_weights(folder: Path, architecture: Architecture) -> TensorSource:
    """A reward model's weights, its score as a value head without a bias.

    Raises ModelFolderError as `first_weights`, and where there are no weights or no score.
    """
    found = SafetensorsFolder(folder)
    if not found:
        raise ModelFolderError(
            f"{folder} holds no weights as safetensors.", hint="A reward model is not drawn from a seed."
        )
    found.require(architecture, head=SCORE)
    return lambda name: (
        torch.zeros(1) if name == VALUE_BIAS else found(SCORE if name == VALUE_WEIGHT else name)
    )


class SeededWeights:
    """`source(name)` of weights drawn from a seed: each tensor from its own generator, so that any part of the model
    is the same in any layout. Norms are 1, biases 0, the rest normal, narrower where layers add up."""

    def __init__(self, architecture: Architecture, seed: int, device: torch.device) -> None:
        self._shapes = expected_shapes(architecture)
        self._depth = math.sqrt(2 * architecture.layers)
        self._seed = seed
        self._device = device

    def __call__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        if name.endswith("bias"):
            return torch.zeros(shape, device=self._device)
        generator = seeded_generator(self._seed, name, self._device)
        std = 0.02 / (self._depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        return torch.randn(shape, generator=generator, device=self._device) * std


def with_value_head(source: TensorSource, hidden: int, seed: int) -> TensorSource:
    """The source with a value head drawn from the seed: normal of the deviation 1 / (hidden + 1), so that the first
    values are near 0 (Stiennon et al., arXiv 2009.01325)."""

    def give(name: str) -> Tensor:
        if name == VALUE_WEIGHT:
            cpu = torch.device("cpu")  # the same on every device
            return torch.randn(1, hidden, generator=seeded_generator(seed, name, cpu)) / (hidden + 1)
        return torch.zeros(1) if name == VALUE_BIAS else source(name)

    return give


def seeded_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Each tensor's own."""
    generator = torch.Generator(device)
    generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
    return generator
