"""The actor's published policies: an arena of its own, and a server of its chunks.

Invariants:
- *the trainer waits for nobody*: see `gyre.weights.publisher`;
- *one after another*: a version is staged after the one before it was committed, on whichever thread;
- *taken over*: a restarted actor of the same job on the same machine finds the versions published before it.

This module must not know what is trained, or who fetches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.config import WeightsSpec
from gyre.errors import Unreachable
from gyre.rollouts.protocol.endpoint import read_weights_endpoint
from gyre.rollouts.weight_dirs import of_publisher
from gyre.rollouts.weight_peer import WeightPeer
from gyre.weights.owned_dirs import default_root
from gyre.weights.publisher import Publication, Publisher
from gyre.weights.version.manifest import layout_of
from gyre.weights.version.model_folder import config_bytes, fingerprint_of

if TYPE_CHECKING:
    import torch

HELD = 3
"""Versions kept: the newest, the one being written, and one that a pinned evaluation may still need."""

ENDPOINT_WITHIN_S = 60.0
"""How long to wait for the rollout manager's address and the weights key. It starts beside the trainer."""


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
        url, key = _wait_for(endpoint or (lambda: read_weights_endpoint(directory)))
        self._settings = settings or WeightsSpec()
        self.peer = WeightPeer(
            root or default_root(), of_publisher(directory), key, self._settings, url=url, held=HELD
        )
        self.arena, self.server = self.peer.arena, self.peer.server
        self.publisher = Publisher(self.arena, self.server, chunk_bytes=self._settings.chunk_bytes)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gyre-weights")
        if self._settings.codec in ("delta", "fp8"):
            self.server.encoded.steps.asked()  # deltas will be asked for: the first step is kept too

    @property
    def address(self) -> str:
        return self.server.address

    def publish(
        self, named: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, version: int, step: int
    ) -> dict[str, Any]:
        """Publish the tensors as a version. Returns `{"version", "checksum", "path", "source", "model", "size_bytes",
        "copy_s", "seconds"}`: the manager's fields, the time of the copy, and of all of it. A tensor is copied once, in
        its own dtype unless the settings say another."""
        return self.begin(named, config, version=version, step=step).result()

    def begin(
        self,
        named: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        version: int,
        step: int,
        lasting: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> Future[dict[str, Any]]:
        """Begin to publish the tensors; the future has what `publish` returns. With `lasting` they stay as they are
        until it is done, and are copied on a thread of this source; otherwise they are copied when this returns, and
        what is left to the thread is the checksums and the commit. `files` go beside `config.json`: the tensors are
        then an adapter, small and not rounded."""
        began = time.monotonic()
        beside = dict(files or {})
        if lasting:
            done = self._worker.submit(
                lambda: self._finish(
                    self._copied(named, config, beside, version, step), config, version, began
                )
            )
        else:
            self._worker.submit(int).result()  # nothing, after all that was begun before
            publication = self._copied(named, config, beside, version, step)
            done = self._worker.submit(lambda: self._finish(publication, config, version, began))
        self._worker.submit(self.arena.make_ready)
        return done

    def _copied(
        self,
        named: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        beside: Mapping[str, bytes],
        version: int,
        step: int,
    ) -> Publication:
        fp8 = self._settings.codec == "fp8" and not beside
        rounded = fp8 or (self._settings.dtype == "bfloat16" and not beside)
        layout, own = layout_of(named, floats="bfloat16" if rounded else None)
        publication = self.publisher.begin(
            version,
            step,
            layout,
            files={**beside, "config.json": config_bytes(config)},
            rounding="fp8" if fp8 else "none",
        )
        try:
            publication.put_all(own)
        except BaseException as error:
            publication.give_up(error)
            raise
        return publication

    def _finish(
        self, publication: Publication, config: Mapping[str, Any], version: int, began: float
    ) -> dict[str, Any]:
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
        self._worker.shutdown(cancel_futures=True)
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
