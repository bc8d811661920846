"""A model that is a folder in Hugging Face's layout: its `config.json`, and its first weights, which are the folder's
safetensors or drawn from a seed.

Each source gives whole tensors by their Hugging Face names, and only what it is asked for: a rank reads what it holds a
piece of.

Invariants:
- *all of it or none*: a folder's tensors are compared with its `config.json` by names, shapes and dtypes before the
  first one is read, on every rank: what is wrong with any is told by all ranks together, and nobody waits for others;
- *never drawn by mistake*: weights are drawn from the seed only where a folder holds none of any kind.

This module must not know about ranks or layouts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.engines.embedded.architecture import Architecture, architecture_of
from gyre.engines.embedded.checkpoint import expected_shapes
from gyre.engines.embedded.errors import CheckpointError
from gyre.errors import ConfigError
from gyre.weights.version.manifest import WeightMismatch

HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The output layers of a policy and of a reward model."""

VALUE_WEIGHT = "value_head.weight"
VALUE_BIAS = "value_head.bias"
"""A critic's head, `[1, hidden]` and `[1]`: no folder has them."""

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
_DTYPES = ("F64", "F32", "F16", "BF16")
"""In safetensors' names. Narrower ones come with scales, which would not be looked at."""


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises ConfigError."""
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no model: {error}.",
            hint="Name a folder in Hugging Face's layout, with config.json.",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / 'config.json'} holds no JSON object.")
    return content


def architecture_in(folder: Path) -> Architecture:
    """The shape of the folder's model. Raises ConfigError where it is none that can be trained here."""
    try:
        return architecture_of(read_config(folder), str(folder))
    except CheckpointError as error:
        raise ConfigError(
            f"{folder} describes a model that is not run here: {error}",
            hint="Qwen2, Qwen3 and Llama shapes are.",
        ) from None


def first_weights(
    folder: Path, architecture: Architecture, seed: int, device: torch.device, *, head: bool = True
) -> SafetensorsFolder | SeededWeights:
    """What a folder holds; where it holds no weights, what the seed gives. Without `head` its output layer is of no
    interest, and may be absent or another one.

    Raises WeightMismatch where they cannot be read or are not those of the architecture.
    """
    found = SafetensorsFolder(folder)
    if found:
        found.refuse_others_than(architecture, head=HEAD if head else None)
        return found
    others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    if others:
        raise WeightMismatch(
            f"{folder} holds weights as {others[0]}, and none as safetensors.",
            hint="Save the model with transformers' save_pretrained, which writes safetensors.",
        )
    return SeededWeights(architecture, seed, device)


def score_weights(folder: Path, architecture: Architecture) -> Callable[[str], Tensor]:
    """What a reward model's folder holds, its score as a value head without a bias.

    Raises WeightMismatch as `first_weights`, and where there are no weights or no score.
    """
    found = SafetensorsFolder(folder)
    if not found:
        raise WeightMismatch(
            f"{folder} holds no weights as safetensors.", hint="A reward model is not drawn from a seed."
        )
    found.refuse_others_than(architecture, head=SCORE)
    return lambda name: (
        torch.zeros(1) if name == VALUE_BIAS else found(SCORE if name == VALUE_WEIGHT else name)
    )


class SafetensorsFolder:
    """`source(name)` of a folder in Hugging Face's layout, in one file or several: those that its index names, or all
    where it has none. Raises WeightMismatch for a file that is not there or cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for path in _files_of(folder):
            try:
                self._files[path.name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightMismatch(
                    f"{path} cannot be read as safetensors: {error}.",
                    hint="Is it whole? A clone without Git LFS has small text files in the place of weights.",
                ) from None
            self._where |= dict.fromkeys(self._files[path.name].keys(), path.name)

    def __bool__(self) -> bool:
        """Whether there are weights in it."""
        return bool(self._where)

    def refuse_others_than(self, architecture: Architecture, *, head: str | None = HEAD) -> None:
        """Raises WeightMismatch unless it holds all tensors of the architecture, each of its shape, and no others. It
        reads none of them. `head` is the output layer that is wanted; None takes any."""
        wanted = expected_shapes(architecture)
        if head != HEAD:
            wanted.pop(HEAD, None)
        if head == SCORE:
            wanted[SCORE] = (1, architecture.hidden)
        missing = sorted(wanted.keys() - self._where.keys())
        unknown = sorted(
            name for name in self._where.keys() - wanted.keys() if not _is_of_no_use(name, wanted)
        )
        if missing or unknown:
            told = [
                f"{what} {len(names)} tensors, {names[0]} among them"
                for what, names in (("lacks", missing), ("holds", unknown))
                if names
            ]
            more = " that the model has not" if unknown else ""
            raise WeightMismatch(
                f"{self._folder} {' and '.join(told)}{more}.",
                hint="Its config.json describes another model than its safetensors.",
            )
        for name, shape in wanted.items():
            found = self._files[self._where[name]].get_slice(name)
            if tuple(found.get_shape()) != shape or found.get_dtype() not in _DTYPES:
                raise WeightMismatch(
                    f"{self._folder}: tensor {name} is {found.get_dtype()} {tuple(found.get_shape())}, the model's is "
                    f"{shape}, of {', '.join(_DTYPES)}.",
                    hint="Its config.json describes another model than its safetensors.",
                )

    def __call__(self, name: str) -> Tensor:
        if name not in self._where:
            raise WeightMismatch(
                f"there is no tensor {name} in {self._folder}.",
                hint="Its config.json describes another model than its safetensors.",
            )
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor


def _files_of(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightMismatch(f"{index} is not an index of shards: {error!r}.") from None
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise WeightMismatch(
            f"{folder} lacks {len(absent)} of the {len(names)} files of its weights, {absent[0]} among them.",
            hint="Copy or download the rest.",
        )
    return [folder / name for name in names]


def _is_of_no_use(name: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a folder may hold it all the same: old models saved their rotary angles, tied ones the embedding twice,
    and a head that is not wanted is a policy's or a reward model's."""
    return name.endswith("rotary_emb.inv_freq") or (name in (HEAD, SCORE) and HEAD not in wanted)


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
