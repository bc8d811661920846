"""The policy versions that a rollout manager knows, and who has their bytes.

Invariants:
- *published means durable*: a version is served after the commit that holds it, so none is ever heard of that the
  next manager does not know;
- *pinned waits*: no version newer than a pinned one is served while the pin stands;
- *one number, one policy*: a version that was published stays what it was; the same number with other bytes is
  refused, from a trainer and from an instance. Only where it is to be had may change;
- *one publisher*: whoever publishes the newest version is where all versions are to be had; a publisher before it is
  dead, and nobody is sent there any more.

This module must not know about samples, sessions or who loads a version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import Loaded, Publish, Weights
from gyre.weights.version.arena import MANIFEST
from gyre.weights.version.manifest import WeightMismatch
from gyre.weights.version.model_folder import ModelFolder

CHECKSUMS_KEPT = 64

WAY_TOLD_EACH_S = 60.0
"""How often it is told at most by which way an instance has its weights: where two ways take turns, with each version
another, that is not news."""

INSTANCES_KNOWN = 4096
"""Of which it is remembered how they had their weights: those that came and went are told of again."""


WEIGHTS_FIELDS = tuple(field.name for field in msgspec.structs.fields(Weights))


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
        self._versions: dict[int, Weights] = {}
        """The served version and those after it."""
        self._checksums: dict[int, str] = {}
        self._ways: dict[str, tuple[tuple[str, str], float]] = {}
        """How each instance had its weights when that was told: by which way, and in which codec; and when."""

    # -- the ledger ---------------------------------------------------------------------------------

    def restore(self, counters: dict[str, Any]) -> None:
        """As `take_counters` gave them."""
        self._checksums = {int(version): text for version, text in counters.get("checksums", {}).items()}
        for known in counters.get("weights", []):
            # A ledger of before has the names of files as well, which are the manifest's matter now.
            self.add(msgspec.convert({key: known[key] for key in WEIGHTS_FIELDS if key in known}, Weights))
        self.served = self._versions.get(counters.get("served_version", -1))
        self.durable = self.newest
        self.model = counters.get("model") or self.model

    def take_counters(self) -> dict[str, Any]:
        """What is to be committed. `committed` is told when it was."""
        self.changed = False
        return {
            "weights": [msgspec.structs.asdict(weights) for _, weights in sorted(self._versions.items())],
            "served_version": self.served.version if self.served is not None else -1,
            "newest_version": self.newest,
            "checksums": {str(version): text for version, text in self._checksums.items()},
            "model": self.model or "",
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

    def is_forgotten(self, version: int) -> bool:
        """Whether it is so old that nobody knows any more with which bytes it was published."""
        return bool(self._checksums) and version < min(self._checksums)

    def checksum_of(self, version: int) -> str:
        """Of a version that was published not long ago; "" of others."""
        return self._checksums.get(version, "")

    def way_changed(self, instance: str, frame: Loaded, now: float) -> dict[str, Any] | None:
        """What is to be told where an instance has its weights by another way than it was told of, or in another codec:
        not of weights that it had already, and of each instance only so often."""
        if frame.way in ("", "here"):
            return None
        way = (frame.way, frame.codec)
        before, told_at = self._ways.get(instance, (None, float("-inf")))
        if way == before or now - told_at < WAY_TOLD_EACH_S:
            return None
        self._ways.pop(instance, None)
        self._ways[instance] = (way, now)
        if len(self._ways) > INSTANCES_KNOWN:
            del self._ways[next(iter(self._ways))]
        told = {"transport": frame.way, "codec": frame.codec, "why": frame.why[:1000]}
        return {"instance": instance, "version": frame.version, **told}

    def publish(self, frame: Publish, model: str) -> bool:
        """Whether it is a new version. `model` is what `model_of` said. Raises FrameError where the version was
        something else before."""
        newest = self.published
        if newest is not None and frame.version <= newest.version:
            if frame.version == newest.version and frame.checksum != newest.checksum:
                raise refuse(
                    "checksum",
                    f"version {frame.version} was published with checksum {newest.checksum}, now {frame.checksum}",
                )
            self._move(frame)
            return False
        self._move_all(frame.sources)
        self.add(
            Weights(
                version=frame.version,
                checksum=frame.checksum,
                sources=frame.sources,
                local_path=frame.path,
            )
        )
        if self.model is None and model not in ("", "unset"):
            self.model = model
        self.changed = True
        return True

    @staticmethod
    def model_of(frame: Publish) -> str:
        """The model's fingerprint, read from the version's folder where that is on this machine. A manifest of 90,000
        tensors takes a second to read: do not call it on an event loop. Raises FrameError where the folder is not what
        the trainer says."""
        path = Path(frame.path)
        if frame.sources and not (frame.path and path.is_dir()):
            return frame.model
        try:
            folder = ModelFolder.read(path)
        except WeightMismatch as error:
            raise refuse("weights", str(error)) from None
        if folder.checksum != frame.checksum:
            raise refuse(
                "checksum",
                f"{frame.path}/{MANIFEST} says {folder.checksum}, the trainer published {frame.checksum}",
            )
        return folder.fingerprint()

    def _move(self, frame: Publish) -> None:
        """A publisher that was started again serves what it has published from elsewhere."""
        known = self._versions.get(frame.version)
        if known is None or known.checksum != frame.checksum:
            return
        if frame.version == self.newest:
            self._move_all(frame.sources)
        self._replace(known.version, sources=frame.sources, local_path=frame.path)

    def _move_all(self, sources: list[str]) -> None:
        """Older versions, which pinned requests need, lie with the publisher too, if it has kept them."""
        for version in self._versions:
            self._replace(version, sources=sources)

    def _replace(self, version: int, **fields: Any) -> None:
        known = self._versions[version]
        moved = msgspec.structs.replace(known, **fields)
        if moved == known:
            return
        self._versions[version] = moved
        self.published = moved if self.published is known else self.published
        self.served = moved if self.served is known else self.served
        self.changed = True

    def add(self, weights: Weights) -> None:
        self.published = weights
        self._versions[weights.version] = weights
        self._checksums[weights.version] = weights.checksum
        for old in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[old]

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
