"""Turns a checkpoint of the Megatron actor, written in whatever layout, into a folder in Hugging Face's layout.

It runs in one process, on the CPU, with neither the job nor its ranks; it takes the memory of the weights twice.

This module must not know of jobs. It imports Megatron when it is called, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gyre.config.sections import MegatronSettings, OptimSettings
from gyre.models.architecture import Architecture
from gyre.models.saving import refuse_taken, save_model_folder
from gyre.weights.version.manifest import checksum_of_weights
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.errors import CheckpointMismatch, NoPolicy
from gyre.workloads.megatron.checkpoints.formats import read_metadata, refuse_pickle

_TIMEOUT_S = 600.0
"""Deadline of collectives in a group of one member, which waits for nobody."""


def export_checkpoint(checkpoint: Path, out: Path, *, dtype: str = "", trust: bool = False) -> dict[str, Any]:
    """Write `out` from the folder `checkpoint`, which holds `actor.json`: its weights, in `dtype` (`float32`,
    `bfloat16`, or "" for the trained ones'), and of the folder that training began with, if it is still there, the
    tokenizer. Returns `{"step", "tensors", "size_bytes", "dtype"}`.

    Megatron's own format is unpickled, and a pickle runs whatever its writer wants: it is read only with `trust`.

    Raises CheckpointMismatch where it is no whole checkpoint of an actor, or its weights are not those that were
    written, and ConfigError where `out` is there or cannot be written, or `trust` is missing.
    """
    from gyre.workloads.megatron.model.seam import open_seam

    device = torch.device("cpu")
    seam = open_seam(device)
    from gyre.models.first_weights import first_weights
    from gyre.models.tensor_names import expected_shapes
    from gyre.workloads.megatron.checkpoints.on_disk import load_weights
    from gyre.workloads.megatron.model.config import architecture_from
    from gyre.workloads.megatron.model.hugging_face import export_weights
    from gyre.workloads.megatron.model.parallel import Ranks
    from gyre.workloads.megatron.policy import MegatronPolicy

    refuse_taken(out)
    metadata = read_metadata(checkpoint)
    refuse_pickle(checkpoint, metadata, trust=trust)
    model = metadata.get("model")
    if model is None:
        raise NoPolicy.at(checkpoint)
    architecture = architecture_from(model["config"], str(checkpoint))
    shapes = expected_shapes(architecture)
    settings = MegatronSettings(device="cpu", dtype=model["dtype"])
    ranks = Ranks(
        WorkloadContext("export", "actor", 0, 1), settings, device=device, timeout_s=_TIMEOUT_S, seed=0
    )
    try:
        policy = MegatronPolicy(
            architecture,
            settings,
            OptimSettings(),
            ranks,
            lambda name: torch.zeros(shapes[name]),  # until the checkpoint's are loaded
            device=device,
            dtype=getattr(torch, model["dtype"]),
            seam=seam,
            trains=False,
        )

        def load_first_model() -> None:
            policy.load(first_weights(Path(model["path"]), architecture, model["seed"], device))

        load_weights(policy, seam, checkpoint, load_first_model=load_first_model)
        tensors = dict(export_weights(policy.module, architecture, ranks))
        if _digest(tensors, architecture, model) != metadata["digest"]:
            raise CheckpointMismatch(f"the weights in {checkpoint} are not those that were written.")
        if dtype:
            tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        beside = Path(model["path"]) if model["path"] else None
        written = save_model_folder(out, model["config"], tensors, beside=beside)
    finally:
        ranks.close()
    return {
        "step": metadata["step"],
        "tensors": written.tensors,
        "size_bytes": written.size_bytes,
        "dtype": dtype or model["dtype"],
    }


def _digest(tensors: dict[str, torch.Tensor], architecture: Architecture, model: dict[str, Any]) -> str:
    """The checksum as the actor computed it: over the small decoder's own names, where it trained that."""
    from gyre.models.tensor_names import from_names

    if model["decoder"]:
        tensors = from_names(tensors, architecture)
    return checksum_of_weights(tensors)
