"""DLRover's loading of data in actors of Ray's, which Gyre leaves to torch's own workers."""

from __future__ import annotations

from typing import Any

from gyre.errors import ConfigError
from gyre_dlrover.notes import has_no_meaning

_WHY = "torch's own worker processes (num_workers) load the data"


def patch_dataloader_ray() -> None:
    """Leaves torch's DataLoader as it is, and warns."""
    has_no_meaning("patch_dataloader_ray", _WHY)


class RayDataLoaderIter:
    """Refused: a worker starts no actors of its own."""

    def __init__(self, loader: Any) -> None:
        raise ConfigError(
            f"RayDataLoaderIter: not in Gyre, where {_WHY}.", hint="Iterate over the DataLoader itself."
        )
