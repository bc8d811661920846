"""Which policy versions an instance has loaded, as far as it has proven that: the only ones whose tokens it may report.

Invariants:
- *acknowledged before believed*: a version counts once the instance has named the checksum of all its bytes. Where
  that word was lost with a connection, the versions that it was told to load count up to the one that it names when it
  is back;
- *an earlier manager's word*: an incarnation that this manager has not met, and that holds samples, may have tokens of
  any version that was published before it came;
- *bounded*: the newest `VERSIONS_KEPT` of an incarnation, and of the instances that left the last `INCARNATIONS_KEPT`.

This module must not know about checksums or samples.
"""

from __future__ import annotations

VERSIONS_KEPT = 64
INCARNATIONS_KEPT = 1024


class LoadedVersions:
    """Those of one incarnation."""

    __slots__ = ("_acknowledged", "_earlier", "_told")

    def __init__(self, *, earlier: int = -1) -> None:
        """`earlier` is the newest version that it may have loaded under an earlier manager, -1 for none."""
        self._acknowledged: set[int] = set()
        self._told: set[int] = set()
        self._earlier = earlier

    def has(self, version: int) -> bool:
        return version in self._acknowledged or 0 <= version <= self._earlier

    def tell(self, version: int) -> None:
        """The instance was asked to load the version."""
        _keep_newest(self._told, version)

    def acknowledge(self, version: int) -> None:
        _keep_newest(self._acknowledged, version)

    def came_back(self, version: int) -> None:
        """It is back, and has proven to have `version`."""
        for told in [told for told in self._told if told <= version]:
            self.acknowledge(told)
        self.acknowledge(version)


class LoadedByIncarnation:
    """What incarnations that left had loaded; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._left: dict[str, LoadedVersions] = {}

    def leave(self, incarnation: str, loaded: LoadedVersions) -> None:
        self._left.pop(incarnation, None)
        self._left[incarnation] = loaded
        if len(self._left) > INCARNATIONS_KEPT:
            del self._left[next(iter(self._left))]

    def join(self, incarnation: str, *, holds: bool, newest: int) -> LoadedVersions:
        """`holds`: it has samples under leases that it proved. `newest` is the newest version that there is."""
        known = self._left.pop(incarnation, None)
        return known if known is not None else LoadedVersions(earlier=newest if holds else -1)


def _keep_newest(versions: set[int], version: int) -> None:
    versions.add(version)
    if len(versions) > VERSIONS_KEPT:
        versions.remove(min(versions))
