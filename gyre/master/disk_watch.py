"""Watches the disks that the job writes to: the master's own look, and what its vertices report of theirs.

A disk is full below one threshold and has room again above another, so that the state does not flicker. A disk that
only a failed write called full (a quota, a disk that nobody watches) has room again when a file can be written.

This module must not know what follows from a full disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.config import FailoverSpec
from gyre.failover.events import DiskFilled, DiskHasRoom
from gyre.workloads.vertex.disk_room import SHARED_MEMORY, DiskLook, DiskRoom, can_write

LOW_SHARE, ROOM_SHARE = 8, 4
"""A small disk is full below an eighth of it, and has room above a quarter."""

SHARED_MEMORY_SHARE = 64
"""Of shared memory weights and Ray's objects may take nearly all: it is full when this part of it is left."""

SAID_HOLD_S = 5.0
"""How long a failed write is believed before it is tried whether one succeeds."""

PROBE_BYTES = 1 << 20


class DiskWatch:
    """`look` looks at the master's own disks."""

    def __init__(
        self,
        spec: FailoverSpec,
        look: DiskLook,
    ) -> None:
        self._spec = spec
        self._look = look
        self._probe: asyncio.Task[bool] | None = None

    async def news(
        self,
        reported: Mapping[str, tuple[str, tuple[DiskRoom, ...]]],
        full: Mapping[str, Mapping[str, Any]],
        now: float,
    ) -> list[DiskFilled | DiskHasRoom]:
        """What has changed. `reported` is, for each vertex that runs, its machine and the disks that it sees; `full`
        are those that are full by the last decision. `now` is in seconds since 1970."""
        rooms: dict[str, tuple[str, DiskRoom]] = {}
        for node, seen in (("", self._look.newest), *reported.values()):
            for room in seen:
                rooms.setdefault(room.disk, (node, room))  # the master's own name for it, where it has one
        known = {(disk["node"], disk["where"]): disk for disk in full.values() if not disk["said"]}
        found: list[DiskFilled | DiskHasRoom] = []
        seen_now = set()
        for node, room in rooms.values():
            seen_now.add((node, room.where))
            low_bytes, room_bytes = self._thresholds(room)
            if (node, room.where) in known:
                if room.available_bytes >= room_bytes:
                    found.append(DiskHasRoom(room.where, room.available_bytes, node))
            elif room.available_bytes < low_bytes:
                found.append(DiskFilled(room.where, room_bytes, room.available_bytes, node))
        if self._look.newest:
            # Whoever saw it is gone, with its machine or into the waiting: a disk that nobody sees keeps nobody.
            found += [DiskHasRoom(where, 0, node) for node, where in known if (node, where) not in seen_now]
        said = [disk for disk in full.values() if disk["said"]]
        if said and all(now - disk["since"] >= SAID_HOLD_S for disk in said) and await self._can_write():
            found += [DiskHasRoom(disk["where"], 0, disk["node"]) for disk in said]
        return found

    def _thresholds(self, room: DiskRoom) -> tuple[int, int]:
        """Below how many bytes the disk is full, and from how many on it has room again."""
        low, enough = self._spec.disk_low_bytes, max(self._spec.disk_low_bytes, self._spec.disk_room_bytes)
        if Path(room.where) == SHARED_MEMORY:
            part = room.total_bytes // SHARED_MEMORY_SHARE
            return min(low, part), min(enough, 2 * part)
        return min(low, room.total_bytes // LOW_SHARE), min(enough, room.total_bytes // ROOM_SHARE)

    async def _can_write(self) -> bool:
        """Whether a file can be written at each of the master's places; False while that is tried, for a disk may
        hang."""
        if self._probe is None:
            places = list(self._look.places)
            self._probe = asyncio.ensure_future(
                asyncio.to_thread(
                    lambda: all(can_write(place, PROBE_BYTES) for place in places if place.is_dir())
                )
            )
        done, _ = await asyncio.wait([self._probe], timeout=0.1)
        if not done:
            return False
        probe, self._probe = self._probe, None
        return probe.result()
