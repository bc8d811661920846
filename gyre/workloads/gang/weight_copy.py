"""A policy version that rollout instances have: found by asking their manager, fetched from their chunk servers.

Invariants:
- *acknowledged*: only a version that an instance has loaded counts, under the checksum that it acknowledged;
- *verified*: the content of a `FetchedCopy` had that checksum, chunk by chunk.

This module must not know who trains on it, or in which layout.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.config import WeightsSpec
from gyre.errors import Unreachable
from gyre.rollouts.protocol.endpoint import read_endpoint, read_trust, read_weights_endpoint
from gyre.rollouts.weight_dirs import of_copy
from gyre.rollouts.weight_peer import WeightPeer
from gyre.weights.owned_dirs import default_root
from gyre.weights.transfer.chunk_transports import Source

if TYPE_CHECKING:
    from torch import Tensor

    from gyre.models.safetensors_folder import SafetensorsFolder

ASK_WITHIN_S = 5.0
"""Deadline of the question to the rollout manager, which answers in a millisecond or not at all."""


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """`sources` are host:port of instances that acknowledged `version` with this checksum; `newest` is the newest
    version that was published."""

    version: int
    checksum: str
    sources: tuple[str, ...]
    newest: int


class WeightCopies:
    """Of the job with this directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def newest(self) -> WeightCopy | None:
        """The newest copy. None if there is no version, or the manager does not answer."""
        where = read_endpoint(self.directory)
        if where is None:
            return None
        url, token = where
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/status", headers={"Authorization": f"Bearer {token}"}
        )
        # Without the environment's proxy: the token is for the manager alone.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=read_trust(self.directory))
        )
        try:
            with opener.open(request, timeout=ASK_WITHIN_S) as reply:
                return copy_of(json.loads(reply.read()))
        except (urllib.error.URLError, OSError, ValueError):  # away for a moment: the caller asks again
            return None


def copy_of(status: dict[str, Any]) -> WeightCopy | None:
    """The newest copy in the manager's status."""
    able = [
        one
        for one in status["instances"]
        if one["state"] != "cut" and one["source"] and one["checksum"] and one["version"] >= 0
    ]
    if not able:
        return None
    best = max(able, key=lambda one: one["version"])
    sources = [one["source"] for one in able if one["checksum"] == best["checksum"]]
    return WeightCopy(best["version"], best["checksum"], tuple(sources), status["version"])


class FetchedCopy:
    """The version as a folder in Hugging Face's layout at `path`, served to others at `address` (any port), until
    `close`. `sources` are (host:port, folder); a folder on this machine is linked.

    `purpose` tells the ranks of a machine apart. Raises Unreachable, WeightsUnreachable, ArenaFull, and WeightMismatch.
    """

    def __init__(
        self,
        directory: Path,
        purpose: str,
        *,
        version: int,
        checksum: str,
        sources: Sequence[tuple[str, str]],
        settings: WeightsSpec | None = None,
        root: Path | None = None,
        give_up_s: float = 60.0,
    ) -> None:
        where = read_weights_endpoint(directory)
        if where is None:
            raise Unreachable(
                f"{directory} does not say where the rollout manager is, whose key instances want.",
                hint="Has the job's directory been lost on this machine?",
            )
        url, key = where
        self.checksum = checksum
        # The settings' networks and ports are for the actor and the instances, one port each: the manager says which
        # instances have the version, and a rank that cannot reach this copy can reach them.
        plane = (settings or WeightsSpec()).model_copy(update={"sender_networks": [], "ports": ""})
        self._peer = WeightPeer(root or default_root(), of_copy(purpose, directory), key, plane, url=url)
        self.address = self._peer.server.address
        try:
            receiver = self._peer.receiver(give_up_s=give_up_s, listener=_Log())
            able = [Source(address, path) for address, path in sources]
            manifest = receiver.manifest_of(version, checksum, lambda: able)
            self.path = receiver.fetch(manifest, lambda: able).files.path
        except BaseException:
            self.close()
            raise

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their Hugging Face names, in memory of their own."""
        return {name: tensor.clone() for name, tensor in self.source().tensors().items()}

    def source(self) -> SafetensorsFolder:
        """The tensors of the version, which may be an adapter alone."""
        from gyre.models.safetensors_folder import SafetensorsFolder

        return SafetensorsFolder(self.path, adapter=True)

    def unlink(self) -> None:
        """Leave the folder without removing it: see `WeightPeer.unlink`."""
        self._peer.unlink()

    def close(self) -> None:
        """Safe to call twice."""
        self._peer.close()


class _Log:
    """The rank's."""

    def incident(self, kind: str, evidence: dict[str, Any]) -> None:
        """Write an incident of this fetch, which was mended."""
        print(f"{kind} {json.dumps(evidence)[:2000]}", flush=True)
