"""The actor's published policies: an arena of its own, and a server of its chunks.

Invariants:
- *the trainer waits for nobody*: see `gyre.weights.publisher`;
- *taken over*: a restarted actor of the same job on the same machine finds the versions published before it.

This module must not know what is trained, or who fetches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.config import WeightsSpec
from gyre.errors import Unreachable
from gyre.rollouts.protocol.endpoint import read_endpoint
from gyre.rollouts.weight_dirs import of_publisher
from gyre.rollouts.weight_peer import WeightPeer
from gyre.weights.owned_dirs import default_root
from gyre.weights.publisher import Publisher
from gyre.weights.version.manifest import layout_of
from gyre.weights.version.model_folder import config_bytes, fingerprint_of

if TYPE_CHECKING:
    import torch

HELD = 3
"""Versions kept: the newest, the one being written, and one that a pinned evaluation may still need."""

ENDPOINT_WITHIN_S = 60.0
"""How long to wait for the rollout manager's address and token. It starts beside the trainer."""


class WeightSource:
    """The weight source of the job with this directory. It listens on this machine's address on the way to the rollout
    manager. Raises Unreachable if the manager's address stays unknown."""

    def __init__(
        self,
        directory: Path,
        endpoint: Callable[[], tuple[str, str] | None] | None = None,
        *,
        root: Path | None = None,
        settings: WeightsSpec | None = None,
    ) -> None:
        url, token = _wait_for(endpoint or (lambda: read_endpoint(directory)))
        self._settings = settings or WeightsSpec()
        self.peer = WeightPeer(
            root or default_root(), of_publisher(directory), token, self._settings, url=url, held=HELD
        )
        self.arena, self.server = self.peer.arena, self.peer.server
        self.publisher = Publisher(self.arena, self.server, chunk_bytes=self._settings.chunk_bytes)
        if self._settings.codec in ("delta", "fp8"):
            self.server.encoded.steps.asked()  # deltas will be asked for: the first step is kept too

    @property
    def address(self) -> str:
        return self.server.address

    def publish(
        self, named: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, version: int, step: int
    ) -> dict[str, Any]:
        """Publish the tensors as a version. Returns `{"version", "checksum", "path", "source", "model", "size_bytes",
        "copy_s", "seconds"}`: the manager's fields, and the trainer's waiting time. A tensor is copied once, in its own
        dtype unless the settings say another."""
        began = time.monotonic()
        fp8 = self._settings.codec == "fp8"
        layout, own = layout_of(
            named, floats="bfloat16" if fp8 or self._settings.dtype == "bfloat16" else None
        )
        publication = self.publisher.begin(
            version,
            step,
            layout,
            files={"config.json": config_bytes(config)},
            rounding="fp8" if fp8 else "none",
        )
        for name, tensor in own.items():
            publication.put(name, tensor)
        manifest = publication.finish().result()
        return {
            "version": version,
            "checksum": manifest.checksum,
            "path": str(self.arena.versions[version].path),
            "source": self.address,
            "model": fingerprint_of(config),
            "size_bytes": manifest.size_bytes,
            "copy_s": round(publication.copy_s, 4),
            "seconds": round(time.monotonic() - began, 4),
        }

    def unlink(self) -> None:
        """Leave the folder without removing it: see `WeightPeer.unlink`."""
        self.peer.unlink()

    def close(self) -> None:
        self.peer.close()


def _wait_for(endpoint: Callable[[], tuple[str, str] | None]) -> tuple[str, str]:
    until = time.monotonic() + ENDPOINT_WITHIN_S
    while (found := endpoint()) is None:
        if time.monotonic() > until:
            raise Unreachable(
                f"the rollout manager has not said within {ENDPOINT_WITHIN_S:g} s where it is.",
                hint="Look at its log: it writes rollouts.json into the job's directory when it listens.",
            )
        time.sleep(0.05)
    return found
