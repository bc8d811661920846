"""The policy in a checkpoint of the plain torch actor, for whoever begins with it.

This module must not know of jobs.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyre.models.architecture import Architecture
from gyre.models.tensor_names import expected_shapes, parameter_parts, to_names
from gyre.weights.version.manifest import checksum_of_weights
from gyre.workloads.torch.errors import CheckpointMismatch

CHECKPOINT_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """`config` is the content of `config.json`; None in checkpoints of an older Gyre, which did not write it down."""

    step: int
    config: dict[str, Any] | None
    weights: dict[str, torch.Tensor]
    """By the decoder's own names."""

    def differences(self, architecture: Architecture) -> list[str]:
        """How names and shapes of the weights differ from those of this decoder."""
        wanted, found = _own_shapes(architecture), {n: tuple(t.shape) for n, t in self.weights.items()}
        return [
            *(f"{name} is missing" for name in sorted(wanted.keys() - found.keys())),
            *(f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())),
            *(
                f"{name} is {found[name]} instead of {wanted[name]}"
                for name in sorted(wanted.keys() & found.keys())
                if found[name] != wanted[name]
            ),
        ]

    def named(self, architecture: Architecture) -> dict[str, torch.Tensor]:
        """The weights by Hugging Face's names; they are this decoder's."""
        return to_names(self.weights, architecture)


def read_policy(folder: Path) -> SavedPolicy:
    """The policy in the checkpoint `folder`. Nothing of it is unpickled but tensors and plain values. Raises
    CheckpointMismatch where it cannot be read, or the weights are not those that were written."""
    file = checkpoint_file(folder, 0)
    content = read_checkpoint(file)
    if content["digest"] != checksum_of_weights(content["model"]):
        raise CheckpointMismatch(f"the weights in {file} are not those that were written.")
    return SavedPolicy(content["step"], content.get("config"), content["model"])


def checkpoint_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.pt"


def read_checkpoint(file: Path) -> dict[str, Any]:
    """What the first rank has written. Raises CheckpointMismatch for what cannot be read, or has another format."""
    try:
        content: dict[str, Any] = torch.load(file, weights_only=True)
    except (
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:  # what torch has for a bad file
        raise CheckpointMismatch(
            f"{file} cannot be read: {error}",
            hint="Is its disk failing? The checkpoint before it may be whole.",
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != CHECKPOINT_FORMAT:
        raise CheckpointMismatch(f"{file} has format {found}, this Gyre reads {CHECKPOINT_FORMAT}.")
    return content


def _own_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    shapes = expected_shapes(architecture)
    return {
        mine: (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
        for mine, parts in parameter_parts(architecture).items()
    }
