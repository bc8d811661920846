"""Turns a checkpoint of FSDP2's ranks, however many wrote it, into a folder in Hugging Face's layout.

It runs in one process, on the CPU, with neither the job nor its ranks.

Invariants:
- *a file at a time*: beside the tensors of one of the folder's files, those of one bundle are in memory, such as the
  experts of a layer: never the model;
- *as the engines had it*: names, bytes and dtype are those that the policy was served in, which the digest of the
  weights says, unless another dtype is asked for.

This module must not know of jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gyre.models.architecture import architecture_of
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.saving import refuse_taken, save_model_folder
from gyre.models.tensor_names import from_names
from gyre.weights.version.manifest import checksum_of_weights
from gyre.workloads.fsdp.checkpoints import DAMAGED, StoredCheckpoint
from gyre.workloads.fsdp.file_names import Bundle, FileNames
from gyre.workloads.fsdp.model import build_causal
from gyre.workloads.fsdp.parts import WEIGHT, Part
from gyre.workloads.fsdp.shards import named_tensors
from gyre.workloads.fsdp.token_model import TokenModel
from gyre.workloads.gang.state_files import StateDamaged
from gyre.workloads.learner.errors import CheckpointMismatch


def export_checkpoint(checkpoint: Path, out: Path, *, dtype: str = "") -> dict[str, Any]:
    """Write `out` from the folder `checkpoint`, which holds `actor.json`: its weights, in `dtype` (`float32`: the
    optimizer's own, `bfloat16`, or "" for that in which the policy was served), and of the folder that training began
    with, if it is still there, the tokenizer. Returns `{"step", "tensors", "size_bytes", "dtype"}`.

    Raises CheckpointMismatch where it is no whole checkpoint of an actor, or its weights are not those that were
    written, and ConfigError where `out` is there or cannot be written, or transformers has no such model.
    """
    refuse_taken(out)
    stored = _opened(checkpoint)
    model = stored.metadata.get("model")
    if model is None:
        raise CheckpointMismatch(
            f"{checkpoint} is not of a policy.",
            hint="A critic's checkpoint has no policy to export; the actor's lies above it.",
        )
    weights = StoredWeights(stored, model["config"], getattr(torch, dtype or model["dtype"]))
    try:
        weights.check()
        problem = stored.damage()
    except CheckpointMismatch as error:
        problem = error.message
    if problem:
        raise CheckpointMismatch(f"the checkpoint at {checkpoint} cannot be read: {problem}.", hint=DAMAGED)
    is_as_served = (dtype or model["dtype"]) == model["dtype"]
    written = save_model_folder(
        out,
        model["config"],
        weights.tensors(),
        beside=Path(model["path"]) if model["path"] else None,
        check=partial(_refuse_others, stored.metadata, checkpoint) if is_as_served else None,
    )
    return {
        "step": stored.metadata["step"],
        "tensors": written.tensors,
        "size_bytes": written.size_bytes,
        "dtype": dtype or model["dtype"],
    }


class StoredWeights:
    """The weights in a checkpoint by the names that files have: the model is that of `hugging_face_config`, its
    parameters are given in `dtype`. Raises ConfigError where transformers has no such model."""

    def __init__(
        self, stored: StoredCheckpoint, hugging_face_config: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        model = TokenModel(build_causal(hugging_face_config, "auto"), values=False)
        self._like = named_tensors(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._like.items()}
        self._names = FileNames(model.causal, shapes)

    def check(self) -> None:
        """Raises CheckpointMismatch unless the checkpoint has all of the model's tensors, and no others."""
        self._stored.check([_part(name, tensor.to("meta")) for name, tensor in self._like.items()])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One after another, whole, in memory of their own."""
        for bundle in self._names.bundles:
            yield from self._names.apart(self._read(bundle)).items()

    def _read(self, bundle: Bundle) -> dict[str, Tensor]:
        found = {name: self._empty(self._like[name]) for name in bundle.names}
        self._stored.load([_part(name, tensor) for name, tensor in found.items()])
        return found

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=self._dtype if isinstance(like, nn.Parameter) else like.dtype)


def _part(name: str, whole: Tensor) -> Part:
    return Part(name, WEIGHT, whole, tuple(whole.shape), 0, whole.numel())


def _opened(checkpoint: Path) -> StoredCheckpoint:
    try:
        return StoredCheckpoint(checkpoint)
    except (StateDamaged, CheckpointMismatch) as error:
        raise CheckpointMismatch(
            f"the checkpoint at {checkpoint} cannot be read: {error.message}.", hint=DAMAGED
        ) from error


def _refuse_others(metadata: dict[str, Any], checkpoint: Path, folder: Path) -> None:
    """Raises CheckpointMismatch where the weights in the folder are not those whose digest the checkpoint has. The
    digest is over the small decoder's own names, where it trained that."""
    if not metadata.get("digest"):
        return
    model, found = metadata["model"], SafetensorsFolder(folder).tensors()
    if model["decoder"]:
        found = from_names(found, architecture_of(model["config"], str(checkpoint)))
    if checksum_of_weights(found) != metadata["digest"]:
        raise CheckpointMismatch(f"the weights in {checkpoint} are not those that were written.")
