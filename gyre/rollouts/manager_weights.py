"""The policy versions that a rollout manager knows, and where their bytes are.

Invariants:
- *published means durable*: a version is served after the commit that holds it, so none is ever heard of that the
  next manager does not know;
- *pinned waits*: no version newer than a pinned one is served while the pin stands;
- *one number, one policy*: a version that was published stays what it was; the same number with other bytes is
  refused, from a trainer and from an instance.

This module must not know about samples, sessions or who loads a version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from gyre.rollouts.frames import Publish, Weights, refuse
from gyre.rollouts.model_folder import LISTING, ModelFolder
from gyre.weights.manifest import WeightMismatch

CHECKSUMS_KEPT = 64

FOLDERS_KEPT = 4
"""Those that an instance may still be fetching."""


class PolicyVersions:
    def __init__(self) -> None:
        self.published: Weights | None = None
        """The newest version."""
        self.served: Weights | None = None
        """The version that instances are to have; behind `published` until that is durable, and while a pinned
        request is open."""
        self.durable = -1
        """The newest version that is in the ledger."""
        self.changed = False
        """There is something for the ledger."""
        self.model: str | None = None
        """Fingerprint of what is published, weights apart; None before it is known."""
        self._folders: dict[int, ModelFolder] = {}
        self._versions: dict[int, Weights] = {}
        """The served version and those after it."""
        self._checksums: dict[int, str] = {}

    # -- the ledger ---------------------------------------------------------------------------------

    def restore(self, counters: dict[str, Any]) -> None:
        """As `take_counters` gave them."""
        self._checksums = {int(version): text for version, text in counters.get("checksums", {}).items()}
        for known in counters.get("weights", []):
            self.add(Weights.model_validate(known))
        self.served = self._versions.get(counters.get("served_version", -1))
        self.durable = self.newest

    def take_counters(self) -> dict[str, Any]:
        """What is to be committed. `committed` is told when it was."""
        self.changed = False
        return {
            "weights": [weights.model_dump() for _, weights in sorted(self._versions.items())],
            "served_version": self.served.version if self.served is not None else -1,
            "newest_version": self.newest,
            "checksums": {str(version): text for version, text in self._checksums.items()},
        }

    def committed(self, counters: dict[str, Any]) -> bool:
        """Whether a newer version is in the ledger now."""
        before, self.durable = self.durable, int(counters["newest_version"])
        return self.durable != before

    # -- what there is ------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        return self.published.version if self.published is not None else -1

    def is_known(self, version: int, checksum: str) -> bool:
        """Whether this number was published with these bytes."""
        return self._checksums.get(version) == checksum

    def publish(self, frame: Publish) -> bool:
        """False where it is known or older. Raises FrameError where the folder is not what the trainer says."""
        newest = self.published
        if newest is not None and frame.version <= newest.version:
            if frame.version == newest.version and frame.checksum != newest.checksum:
                raise refuse(
                    "checksum",
                    f"version {frame.version} was published with checksum {newest.checksum}, now {frame.checksum}",
                )
            return False
        try:
            folder = ModelFolder.read(Path(frame.path))
        except WeightMismatch as error:
            raise refuse("weights", str(error)) from None
        if folder.checksum != frame.checksum:
            raise refuse(
                "checksum",
                f"{frame.path}/{LISTING} says {folder.checksum}, the trainer published {frame.checksum}",
            )
        self.add(
            Weights(
                version=frame.version,
                checksum=frame.checksum,
                files=folder.files,
                path=f"/v1/weights/{frame.version}",
                local_path=str(folder.path),
            )
        )
        self.changed = True
        return True

    def add(self, weights: Weights) -> None:
        folder = ModelFolder(Path(weights.local_path), weights.files, weights.checksum)
        self.published = weights
        self._versions[weights.version] = weights
        self._folders[weights.version] = folder
        self._checksums[weights.version] = weights.checksum
        for old in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[old]
        for old in sorted(self._folders)[:-FOLDERS_KEPT]:
            if self.served is None or old != self.served.version:
                del self._folders[old]
        if self.model is None and (model := folder.fingerprint()) != "unset":
            self.model = model

    def promote(self, pinned: int | None) -> Weights | None:
        """Serve the newest version that is in the ledger and not beyond `pinned`; None where that is no newer one."""
        served = self.served.version if self.served is not None else -1
        limit = self.durable if pinned is None else min(pinned, self.durable)
        able = [version for version in self._versions if served < version <= limit]
        if not able:
            return None
        self.served = self._versions[max(able)]
        for version in [version for version in self._versions if version < self.served.version]:
            del self._versions[version]
        self.changed = True
        return self.served

    # -- HTTP ---------------------------------------------------------------------------------------

    def file(self, version: str, name: str) -> web.StreamResponse:
        """The answer to `GET /v1/weights/{version}/{name}`."""
        folder = self._folders.get(int(version)) if version.isdecimal() and len(version) < 12 else None
        if folder is None or name not in {file.name for file in folder.files}:
            return web.json_response(
                {"code": "not_found", "message": f"version {version} has no file {name} here"}, status=404
            )
        return web.FileResponse(folder.path / name)
