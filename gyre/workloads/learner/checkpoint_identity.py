"""Whose checkpoint a folder is: the back end that wrote it, and the model that it is of.

A job goes on from checkpoints of its own back end and of its own model. Of another back end's a new job takes the
weights (`gyre run --from`).

This module must not import torch, and must not know how a back end reads its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.graph.backends import Backend, back_ends
from gyre.models.architecture import Architecture, architecture_of
from gyre.models.errors import ModelFolderError, NotComputed
from gyre.models.support import differences
from gyre.workloads.learner.errors import CheckpointMismatch

METADATA = "actor.json"
"""What the first rank of a back end whose ranks share a model writes last."""

OWN_MODEL = (
    "Give the job what it began with: config.model_path, config.model or config.lora is another one's."
)
"""The hint for a checkpoint of another model, or of an adapter of another kind."""


def written_by(folder: Path) -> Backend | None:
    """The back end that wrote the checkpoint, by the files that it has and the format that they name; None where it is
    none."""
    there = [one for one in back_ends() if (folder / one.checkpoints[0]).is_file()]
    told = str(_format_in(folder / METADATA))
    for one in sorted(there, key=lambda one: (one.checkpoints[0] != METADATA, not one.checkpoints[1])):
        if told.startswith(one.checkpoints[1]):
            return one
    return None


def refuse_another_writer(folder: Path, own: Backend) -> None:
    """Raises CheckpointMismatch for a checkpoint of another back end than `own`."""
    writer = written_by(folder)
    if (folder / METADATA).is_file() and _format_in(folder / METADATA) is None:
        return  # damaged, which its own reader says
    if writer is not None and writer != own:
        raise CheckpointMismatch(
            f"the checkpoint at {folder} is one of {writer.writer}, not of {own.writer}.",
            hint=f"A new job begins with its weights: gyre run JOB_FILE --from {folder}.",
        )


def refuse_another_model(folder: Path, config: Mapping[str, Any] | None, own: Architecture | None) -> None:
    """Raises CheckpointMismatch where the content of `config.json` that a checkpoint holds describes another model than
    `own`, by what differs. None is of no policy, or of a model that Gyre's own decoder does not compute."""
    if problem := another_model(config, own):
        raise CheckpointMismatch(
            f"the checkpoint at {folder} is of another model: {problem}.", hint=OWN_MODEL
        )


def config_in(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of `config.json` in what an actor says of its checkpoint; None in a critic's."""
    model = metadata.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    return config if isinstance(config, dict) else None


def another_config(theirs: Mapping[str, Any] | None, own: Mapping[str, Any]) -> str:
    """How the model of one `config.json` is another than that of `own`; "" where it is the same. Of a kind that Gyre's
    own decoder does not compute, whoever loads the tensors compares the rest."""
    if theirs is None:
        return ""
    if theirs.get("model_type") != own.get("model_type"):
        return f"model_type is {theirs.get('model_type')} instead of {own.get('model_type')}"
    try:
        return another_model(theirs, architecture_of(dict(own), "config.json"))
    except NotComputed:
        return ""


def another_model(config: Mapping[str, Any] | None, own: Architecture | None) -> str:
    """What `refuse_another_model` says of it; "" where it is the same."""
    if config is None or own is None:
        return ""
    try:
        theirs = architecture_of(dict(config), "its config")
    except ModelFolderError as error:
        return error.message.rstrip(".")
    return ", ".join(differences(theirs, own, of_folder=True)[:4])


def _format_in(file: Path) -> Any:
    """The format that `actor.json` names; None where it cannot be read, which its back end's own reader explains."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None
