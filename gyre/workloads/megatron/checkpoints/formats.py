"""What the first rank writes down of a checkpoint of Megatron's ranks, and which formats of the rest there are.

Invariant *no stranger's pickle*: Megatron's own format is unpickled, and a pickle runs whatever its writer wants. It is
read only from the job's own folder, or where somebody says that its writer is trusted.

This module must not import Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyre.errors import ConfigError
from gyre.workloads.gang.state_files import is_broken
from gyre.workloads.learner.checkpoint_identity import METADATA
from gyre.workloads.learner.errors import CheckpointMismatch

FORMAT = 2
"""Gyre's own: bytes and JSON."""
MEGATRONS_FORMAT = 1
"""`megatron.core.dist_checkpointing`: pickles."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The content of `actor.json`. Raises CheckpointMismatch where there is none, or one of another format."""
    try:
        metadata: dict[str, Any] = json.loads((path / METADATA).read_text())
        if not isinstance(metadata, dict):
            raise ValueError(f"{METADATA} is no object")
        if is_broken(metadata):
            raise ValueError(f"{METADATA} is not what was written")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointMismatch(
            f"there is no whole checkpoint at {path}: {error}.",
            hint="Is its disk there? If it is lost for good, run.lost_checkpoint: weights goes on without it.",
        ) from None
    if metadata.get("format") not in (FORMAT, MEGATRONS_FORMAT):
        raise CheckpointMismatch(f"{path} has format {metadata.get('format')}, this Gyre reads {FORMAT}.")
    return metadata


def refuse_broken(path: Path, metadata: dict[str, Any]) -> None:
    """Raises CheckpointMismatch where the content of `actor.json` is not what was written. Called before anything is
    loaded, on every rank, after whatever else is plainly wrong with it was said."""
    if is_broken(metadata):
        raise CheckpointMismatch(
            f"the checkpoint at {path} is damaged: the bytes of {METADATA} are not those that were written.",
            hint="Is its disk failing? The checkpoint before it may be whole.",
        )


def refuse_strangers_pickle(path: Path, *, own: Path) -> None:
    """Raises CheckpointMismatch for a checkpoint that would be unpickled and does not lie below the folder `own`."""
    if read_metadata(path)["format"] != FORMAT and not path.resolve().is_relative_to(own.resolve()):
        raise CheckpointMismatch(
            f"{path} is in Megatron's own format, which is unpickled, and lies outside of the job's folder {own}.",
            hint="If you know who wrote it, bring it there.",
        )


def refuse_pickle(path: Path, metadata: dict[str, Any], *, trust: bool) -> None:
    """Raises ConfigError for a checkpoint that would be unpickled, unless its writer is trusted."""
    if metadata["format"] != FORMAT and not trust:
        raise ConfigError(
            f"{path} is in Megatron's own format, which is unpickled: it would run what its writer wants.",
            hint="If you know who wrote it, give --trust.",
        )


def model_in(path: Path, *, trust: bool) -> dict[str, Any] | None:
    """What the checkpoint says of its model; None where it is of no policy. Raises CheckpointMismatch where it says
    nothing that can be read, and ConfigError where it would be unpickled and is not trusted."""
    metadata = read_metadata(path)
    refuse_pickle(path, metadata, trust=trust)
    model: dict[str, Any] | None = metadata.get("model")
    return model
