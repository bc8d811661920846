"""A model that is a folder in Hugging Face's layout: its `config.json`, and its first weights, which are the folder's
safetensors or drawn from a seed.

Each source gives whole tensors by their Hugging Face names, and only what it is asked for: a rank reads what it holds a
piece of. This module must not know about ranks or layouts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from gyre.errors import ConfigError
from gyre.rollouts.engines.embedded.architecture import Architecture, architecture_of
from gyre.rollouts.engines.embedded.checkpoint import expected_shapes
from gyre.rollouts.engines.embedded.errors import CheckpointError
from gyre.weights.manifest import WeightMismatch

VALUE_WEIGHT = "value_head.weight"
VALUE_BIAS = "value_head.bias"
"""A critic's head, `[1, hidden]` and `[1]`: no folder has them."""


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises ConfigError."""
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config.megatron.model_path: {folder} holds no model: {error}.",
            hint="Name a folder in Hugging Face's layout, with config.json.",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"config.megatron.model_path: {folder / 'config.json'} holds no JSON object.")
    return content


def architecture_in(folder: Path) -> Architecture:
    """The shape of the folder's model. Raises ConfigError where it is none that can be trained here."""
    try:
        return architecture_of(read_config(folder), str(folder))
    except CheckpointError as error:
        raise ConfigError(
            f"config.megatron.model_path: {folder} describes a model that is not trained here: {error}",
            hint="Qwen2, Qwen3 and Llama shapes are.",
        ) from None


def first_weights(
    folder: Path, architecture: Architecture, seed: int, device: torch.device
) -> SafetensorsFolder | SeededWeights:
    """What a folder holds; where it holds no weights, what the seed gives."""
    return SafetensorsFolder(folder) or SeededWeights(architecture, seed, device)


class SafetensorsFolder:
    """`source(name)` of a folder in Hugging Face's layout, in one file or several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._files[path.name] = safe_open(path, framework="pt")
            self._where |= dict.fromkeys(self._files[path.name].keys(), path.name)

    def __bool__(self) -> bool:
        """Whether there are weights in it."""
        return bool(self._where)

    def __call__(self, name: str) -> Tensor:
        if name not in self._where:
            raise WeightMismatch(
                f"there is no tensor {name} in {self._folder}.",
                hint="Its config.json describes another model than its safetensors.",
            )
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor


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
        generator = _generator(self._seed, name, self._device)
        std = 0.02 / (self._depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        return torch.randn(shape, generator=generator, device=self._device) * std


def with_value_head(source: Callable[[str], Tensor], hidden: int, seed: int) -> Callable[[str], Tensor]:
    """The source, and a value head drawn from the seed: normal of the deviation 1 / (hidden + 1), so that the first
    values are near 0 (Stiennon et al., arXiv 2009.01325)."""

    def give(name: str) -> Tensor:
        if name == VALUE_WEIGHT:
            cpu = torch.device("cpu")  # the same on every device
            return torch.randn(1, hidden, generator=_generator(seed, name, cpu)) / (hidden + 1)
        return torch.zeros(1) if name == VALUE_BIAS else source(name)

    return give


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Each tensor's own."""
    generator = torch.Generator(device)
    generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
    return generator
