"""The policy versions that a rollout manager knows, and their sources.

Invariants:
- *published means durable*: a version is served after the commit that holds it, so instances never hear of a version
  that the next manager does not know;
- *pinned waits*: no version newer than a pinned one is served while the pin stands;
- *one number, one policy*: a published version never changes; the same number with other bytes is refused, from a
  trainer and from an instance. Only its sources may change;
- *one publisher*: the publisher of the newest version is the source of all versions; an earlier publisher is dead, and
  nobody is sent there any more.

This module must not know about samples, links or who loads a version.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import Loaded, Publish, Weights

CHECKSUMS_KEPT = 64

WAY_TOLD_EACH_S = 60.0
"""Least time between two events about one instance's transport: two transports that alternate are not news."""

INSTANCES_KNOWN = 4096
"""Most instances whose last transport is remembered."""


class PolicyVersions:
    def __init__(self) -> None:
        self.published: Weights | None = None
        """The newest version."""
        self.served: Weights | None = None
        """The version that instances should have; behind `published` until that is durable, and while a pinned request
        is open."""
        self.durable = -1
        """The newest version that is in the ledger."""
        self.changed = False
        """Whether there is something to commit to the ledger."""
        self.model: str | None = None
        """Fingerprint of the published model without its weights; None before it is known."""
        self._versions: dict[int, Weights] = {}
        """The served version and those after it."""
        self._checksums: dict[int, str] = {}
        self._ways: dict[str, tuple[tuple[str, str], float]] = {}
        """The transport and codec of each instance in its last event, and the event's time."""

    # -- the ledger ---------------------------------------------------------------------------------

    def restore(self, counters: dict[str, Any]) -> None:
        """Restore the state from counters that `take_counters` returned."""
        self._checksums = {int(version): text for version, text in counters.get("checksums", {}).items()}
        for known in counters.get("weights", []):
            self.add(msgspec.convert(known, Weights))
        self.served = self._versions.get(counters.get("served_version", -1))
        self.durable = self.newest
        self.model = counters.get("model") or self.model

    def take_counters(self) -> dict[str, Any]:
        """The counters to commit; `committed` has to be called after the commit."""
        self.changed = False
        return {
            "weights": [msgspec.structs.asdict(weights) for _, weights in sorted(self._versions.items())],
            "served_version": self.served.version if self.served is not None else -1,
            "newest_version": self.newest,
            "checksums": {str(version): text for version, text in self._checksums.items()},
            "model": self.model or "",
        }

    def committed(self, counters: dict[str, Any]) -> bool:
        """Note that these counters are in the ledger; returns whether they have a newer version."""
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
        """Whether it is so old that its checksum is no longer known."""
        return bool(self._checksums) and version < min(self._checksums)

    def checksum_of(self, version: int) -> str:
        """The checksum of a recent version; "" for others."""
        return self._checksums.get(version, "")

    def way_changed(self, instance: str, frame: Loaded, now: float) -> dict[str, Any] | None:
        """The event's fields if an instance got its weights by another transport or codec than in its last event. None
        if they are the same, if it had the weights already, or if that event is recent."""
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
        """Take a published version; returns whether it is new. `model` is the fingerprint of its shape. Raises
        FrameError if the version was published with other bytes before."""
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

    def _move(self, frame: Publish) -> None:
        """Take the new address of a publisher that was restarted."""
        known = self._versions.get(frame.version)
        if known is None or known.checksum != frame.checksum:
            return
        if frame.version == self.newest:
            self._move_all(frame.sources)
        self._replace(known.version, sources=frame.sources, local_path=frame.path)

    def _move_all(self, sources: list[str]) -> None:
        """Give all versions these sources: older ones, which pinned requests need, are with the publisher too."""
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
        """Serve the newest version that is in the ledger and not beyond `pinned`; None if it is served already."""
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
