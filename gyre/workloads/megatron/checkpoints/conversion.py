"""Turns a checkpoint of the Megatron actor, written in whatever layout, into a folder in Hugging Face's layout.

It runs in one process, on the CPU, with neither the job nor its ranks.

Invariants:
- *a file at a time*: beside the tensors of one of the folder's files, those of one of Megatron's parameters are in
  memory, whole and in the pieces that ranks wrote: never the model. Megatron's own format alone is loaded whole;
- *as the engines had it*: the digest of the weights is compared before anything is written.

This module must not know of jobs. It imports Megatron when it is called, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gyre.config.sections import MegatronSettings, OptimSettings
from gyre.models.architecture import Architecture
from gyre.models.safetensors_folder import TensorSource
from gyre.models.saving import refuse_taken, save_model_folder
from gyre.models.tensor_names import expected_shapes, parameter_parts
from gyre.weights.version.manifest import checksum_of_read
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.errors import CheckpointMismatch, NoPolicy
from gyre.workloads.megatron.checkpoints.formats import (
    MEGATRONS_FORMAT,
    read_metadata,
    refuse_broken,
    refuse_pickle,
)

if TYPE_CHECKING:
    from gyre.workloads.megatron.checkpoints.on_disk import Seam

_CPU = torch.device("cpu")
_TIMEOUT_S = 600.0
"""Deadline of collectives in a group of one member, which waits for nobody."""


def export_checkpoint(
    checkpoint: Path, out: Path, *, dtype: str = "", trust: bool = False, adapter: bool = False
) -> dict[str, Any]:
    """Write `out` from the folder `checkpoint`, which holds `actor.json`: its weights, in `dtype` (`float32`,
    `bfloat16`, or "" for the trained ones'), and of the folder that training began with, if it is still there, the
    tokenizer. Returns `{"step", "tensors", "size_bytes", "dtype"}`.

    Megatron's own format is unpickled, and a pickle runs whatever its writer wants: it is read only with `trust`.

    Raises CheckpointMismatch where it is no whole checkpoint of an actor, or its weights are not those that were
    written, and ConfigError where `out` is there or cannot be written, or `trust` is missing.
    """
    from gyre.workloads.megatron.model.seam import open_seam

    seam = open_seam(_CPU)
    from gyre.workloads.megatron.model.config import architecture_from

    refuse_taken(out)
    metadata = read_metadata(checkpoint)
    refuse_pickle(checkpoint, metadata, trust=trust)
    model = metadata.get("model")
    if model is None:
        raise NoPolicy.at(checkpoint)
    refuse_broken(checkpoint, metadata)
    architecture = architecture_from(model["config"], str(checkpoint))
    said = dtype or model["dtype"]
    with _weights(checkpoint, metadata, architecture, seam) as (names, source):
        if _digest(source, architecture, model) != metadata["digest"]:
            raise CheckpointMismatch(f"the weights in {checkpoint} are not those that were written.")
        tensors = ((name, source(name).to(getattr(torch, said))) for name in names)
        beside = Path(model["path"]) if model["path"] else None
        written = save_model_folder(out, model["config"], tensors, beside=beside)
    return {
        "step": metadata["step"],
        "tensors": written.tensors,
        "size_bytes": written.size_bytes,
        "dtype": said,
    }


@contextmanager
def _weights(
    checkpoint: Path, metadata: dict[str, Any], architecture: Architecture, seam: Seam
) -> Iterator[tuple[Sequence[str], TensorSource]]:
    """The names of the checkpoint's weights, in the order in which they are best read, and what gives them in the
    trained dtype."""
    from gyre.models.first_weights import first_weights
    from gyre.workloads.megatron.checkpoints.on_disk import FIRST_MODEL

    model = metadata["model"]
    kind = getattr(torch, model["dtype"])
    names = list(expected_shapes(architecture))
    if metadata["format"] == MEGATRONS_FORMAT:
        with _loaded(checkpoint, model, architecture, seam) as tensors:
            yield names, tensors.__getitem__
    elif metadata.get(FIRST_MODEL):
        first = first_weights(Path(model["path"]), architecture, model["seed"], _CPU)
        yield names, lambda name: first(name).to(kind)
    else:
        stored = MegatronStoredWeights(checkpoint, metadata, architecture, kind)
        yield stored.names, stored


class MegatronStoredWeights:
    """`source(name)` gives a weight of a checkpoint in Gyre's own format, whole and in `dtype`: a view of the parameter
    that it is a part of, which is read anew unless the last one asked for was of it too. Raises CheckpointMismatch
    where they are not all there, or a byte is not what was written."""

    def __init__(
        self, checkpoint: Path, metadata: dict[str, Any], architecture: Architecture, dtype: torch.dtype
    ) -> None:
        from gyre.workloads.megatron.checkpoints.on_disk import verified
        from gyre.workloads.megatron.checkpoints.parts import WEIGHT, MegatronPart
        from gyre.workloads.megatron.model.config import padded_vocab
        from gyre.workloads.megatron.model.hugging_face import whole_parameters
        from gyre.workloads.megatron.model.parallel import OneReader

        self._architecture = architecture
        self._dtype = dtype
        every = list(whole_parameters(architecture, padded_vocab(architecture.vocab, 1)))
        parts = []
        for held in every:
            empty = torch.empty(held.parameter.shape, dtype=dtype, device="meta")
            parts.append(
                MegatronPart(
                    held.key, WEIGHT, empty, tuple(empty.shape), 0, empty.numel(), shared=True, held=held
                )
            )
        self._parts = {
            name: part for held, part in zip(every, parts, strict=True) for name in held.parameter.parts
        }
        self.names = list(self._parts)
        self._stored = verified(OneReader(), architecture, checkpoint, metadata, parts)
        self._last: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        from gyre.workloads.megatron.model.hugging_face import taken_apart

        if name not in self._last:
            self._last = {}  # before there is memory for the next
            part = self._parts[name]
            assert part.held is not None
            whole = torch.empty(part.shape, dtype=self._dtype)
            self._stored.load([replace(part, tensor=whole)])
            self._last = taken_apart(part.held, whole, self._architecture)
        return self._last[name]


@contextmanager
def _loaded(
    checkpoint: Path, model: dict[str, Any], architecture: Architecture, seam: Seam
) -> Iterator[dict[str, Tensor]]:
    """The weights of a checkpoint in Megatron's own format, which Megatron loads into a model of its own."""
    from gyre.workloads.megatron.checkpoints import megatron_format
    from gyre.workloads.megatron.model.hugging_face import export_weights
    from gyre.workloads.megatron.model.parallel import MegatronRanks
    from gyre.workloads.megatron.policy import MegatronPolicy

    shapes = expected_shapes(architecture)
    settings = MegatronSettings(device="cpu", dtype=model["dtype"])
    ranks = MegatronRanks(
        WorkloadContext("export", "actor", 0, 1), settings, device=_CPU, timeout_s=_TIMEOUT_S, seed=0
    )
    try:
        policy = MegatronPolicy(
            architecture,
            settings,
            OptimSettings(),
            ranks,
            lambda name: torch.zeros(shapes[name]),  # until the checkpoint's are loaded
            device=_CPU,
            dtype=getattr(torch, model["dtype"]),
            seam=seam,
            trains=False,
        )
        megatron_format.load_weights(policy, seam, checkpoint)
        yield dict(export_weights(policy.module, architecture, ranks))
    finally:
        ranks.close()


def _digest(source: TensorSource, architecture: Architecture, model: dict[str, Any]) -> str:
    """The checksum as the actor computed it: over the small decoder's own names, where it trained that."""
    shapes, dtype = expected_shapes(architecture), model["dtype"]
    if not model["decoder"]:
        return checksum_of_read({name: (dtype, shape) for name, shape in shapes.items()}, source)
    joined = parameter_parts(architecture)

    def read(name: str) -> Tensor:
        return torch.cat([source(part) for part in joined[name]])

    rows = {name: sum(shapes[part][0] for part in parts) for name, parts in joined.items()}
    return checksum_of_read(
        {name: (dtype, (rows[name], *shapes[parts[0]][1:])) for name, parts in joined.items()}, read
    )
