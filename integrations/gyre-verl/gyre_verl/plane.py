"""Versions that the first rank serves itself, on the fleet's weight plane: instances fetch their chunks of it and of
each other, and nobody needs a disk in common.

It needs Gyre in verl's environment (`gyre-verl[plane]`), whose publisher it is: versions lie in this machine's shared
memory, the newest three, and threads of this process serve them. When the process dies, instances that have the newest
version serve it on.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_verl.door import Door, DoorError

if TYPE_CHECKING:
    import torch


class PlaneSource:
    """The door tells a key with the scope `publish` the plane's key and settings. `bind` and `ports` are this
    machine's, None for the fleet's; versions lie below `root`, None for shared memory. Raises DoorError where Gyre is
    not here, the door does not tell, or this machine cannot follow the settings."""

    def __init__(
        self,
        door: Door,
        model: Path,
        *,
        bind: str | None = None,
        ports: str | None = None,
        root: Path | None = None,
    ) -> None:
        try:
            from gyre.config import WeightsSpec
            from gyre.errors import GyreError
            from gyre.workloads.gang.weight_source import WeightSource
        except ImportError as error:
            raise DoorError(
                f"fleet.weights=plane needs Gyre in verl's environment ({error}): pip install 'gyre-verl[plane]'."
            ) from None
        told = door.plane()
        own = {name: value for name, value in (("bind", bind), ("ports", ports)) if value is not None}
        try:
            settings = WeightsSpec.model_validate({**told["weights"], **own})
            self._source = WeightSource(
                Path(f"verl at {door.url}"), lambda: (door.url, told["key"]), root=root, settings=settings
            )
        except (GyreError, ValueError) as error:
            raise DoorError(
                f"this machine cannot serve versions as the fleet's weights say: {error}"
            ) from None
        atexit.register(self._source.close)  # a process that is killed leaves its folder to the next run's
        self._config = json.loads((model / "config.json").read_text())
        self._is_dialled = not settings.bind

    @property
    def address(self) -> str:
        return self._source.address

    def close(self) -> None:
        self._source.close()

    def put(self, named: Mapping[str, torch.Tensor], version: int) -> dict[str, Any]:
        """Serve the tensors as this version. Where it listens on the way to the manager, the manager is to dial it
        before it takes the version; in a network of its own (`weights.bind`) the manager need not be."""
        told = self._source.publish(named, self._config, version=version, step=version)
        return {
            "checksum": told["checksum"],
            "sources": [told["source"]],
            "model": told["model"],
            "dial": self._is_dialled,
        }
