"""What the first rank writes down of a checkpoint of FSDP2's ranks.

This module must not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyre.workloads.gang.state_files import is_broken
from gyre.workloads.learner.checkpoint_identity import METADATA
from gyre.workloads.learner.errors import CheckpointMismatch

FORMAT = "fsdp-1"
MOST_RANKS = 1 << 20
ADAPTER = "lora"
"""The key of the metadata under which an adapter's checkpoint says of what kind it is, and beside what."""


def read_metadata(folder: Path) -> dict[str, Any]:
    """The content of `actor.json`. Raises CheckpointMismatch where there is none, or one of another format."""
    try:
        content: dict[str, Any] = json.loads((folder / METADATA).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointMismatch(f"there is no whole one: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        said = content.get("format") if isinstance(content, dict) else content
        raise CheckpointMismatch(f"it has format {said!r:.100}, and FSDP2's ranks read {FORMAT}")
    if is_broken(content):
        raise CheckpointMismatch(f"the bytes of {METADATA} are not those that were written")
    ranks, updates = content.get("ranks"), content.get("updates")
    if type(ranks) is not int or not 0 < ranks <= MOST_RANKS or type(updates) is not int:
        raise CheckpointMismatch(f"{METADATA} says that {ranks!r:.100} ranks wrote it")
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointMismatch(f"{METADATA} has no metadata")
    return content


def model_in(folder: Path, *, trust: bool) -> dict[str, Any] | None:
    """What the checkpoint says of its model; None where it is of no policy. Raises CheckpointMismatch where it says
    nothing that can be read. `trust` says nothing here: nothing is unpickled."""
    try:
        metadata = read_metadata(folder)["metadata"]
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"The checkpoint {folder} cannot be read: {error.message}.",
            hint="The one before it may be whole.",
        ) from error
    model: dict[str, Any] | None = metadata.get("model")
    return model
