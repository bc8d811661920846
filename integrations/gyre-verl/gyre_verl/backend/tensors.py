"""Whole tensors, and what a rank holds of them: FSDP2 gives each rank consecutive rows of a parameter.

Invariants:
- *all of it or nothing*: no tensor is changed before all ranks have read all of theirs;
- *nothing is passed over*: a model's tensors are those that its source has, or it is refused.

This module must not know about steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gyre.models.errors import ModelFolderError
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.safetensors_files import ANOTHER_MODEL
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import is_harmless
from gyre.weights.version.manifest import WeightMismatch


def local_of(tensor: Any) -> Tensor:
    """This rank's part: the memory itself."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.detach()


def rows_of_rank(tensor: Any, *, rank: int, ranks: int) -> slice:
    """Which rows of the whole tensor this rank has: FSDP2 deals them as `torch.chunk`."""
    size = math.ceil(tensor.shape[0] / ranks)
    start = min(size * rank, tensor.shape[0])
    return slice(start, min(start + size, tensor.shape[0]))


def refuse_unknown(own: Collection[str], held: Collection[str]) -> None:
    """Raises WeightMismatch for tensors in a model's files that verl's model does not have by this name, or lacks."""
    wanted = set(own)
    strange = sorted(name for name in held if name not in wanted and not is_harmless(name, wanted))
    missing = sorted(wanted - set(held))
    if strange or missing:
        told = [f"it has no {name}" for name in strange[:2]] + [f"there is no {name}" for name in missing[:2]]
        raise WeightMismatch(
            f"verl's model has other tensors than the folder: {', '.join(told)}.",
            hint="Models whose tensors transformers renames, those of experts among them, are for backend: fsdp.",
        )


def load(tensors: Mapping[str, Any], source: TensorSource, *, rank: int, ranks: int, together: Any) -> None:
    """Take the source's tensors. `together(problem)` raises on all ranks where one has a problem. Raises WeightMismatch
    and ModelFolderError; nothing is changed then."""
    mine: dict[str, Tensor] = {}
    broken: list[str] = []
    problem: Exception | None = None
    try:
        for name, tensor in tensors.items():
            whole = _checked(source, name, tuple(tensor.shape))
            if not is_finite(whole):
                broken.append(name)
            kept = (
                whole[rows_of_rank(tensor, rank=rank, ranks=ranks)] if hasattr(tensor, "to_local") else whole
            )
            mine[name] = kept.clone()  # it may be a view of a file, or of the whole
        refuse_not_finite(broken)
    except (WeightMismatch, ModelFolderError) as error:
        problem = error
    together(problem)
    with torch.no_grad():
        for name, tensor in tensors.items():
            local_of(tensor).copy_(mine[name])


def _checked(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    try:
        tensor = source(name)
    except KeyError as error:
        raise WeightMismatch(f"there is no tensor {name}.", hint=ANOTHER_MODEL) from error
    if tuple(tensor.shape) != shape:
        raise WeightMismatch(
            f"tensor {name} is {tuple(tensor.shape)}, the model's is {shape}.", hint=ANOTHER_MODEL
        )
    return tensor
