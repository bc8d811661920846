"""How much of this process's cores is in use, by whatever process.

The cores are those that the process may run on; within a container with a quota, what the quota allows is all there is.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from gyre.clock import Clock

_HERTZ = os.sysconf("SC_CLK_TCK")


EVERY_S = 1.0
"""Shortest time that is looked at: ticks of a core are hundredths of a second."""


class CoreUsage:
    """Share of the cores in use, of the last second or more. `root`: of the file system, for tests."""

    def __init__(self, *, root: Path = Path("/"), clock: Clock = time) -> None:
        self._root = root
        self._clock = clock
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self._last = self._read()
        self._at = clock.monotonic()
        self._share: float | None = None

    def look(self) -> float | None:
        """Returns a share from 0 to 1, or None before the first second and where the system does not say."""
        if self._clock.monotonic() - self._at < EVERY_S:
            return self._share
        self._at = self._clock.monotonic()
        before, self._last = self._last, self._read()
        shares = []
        for (used, there), (used_before, there_before) in zip(self._last, before, strict=False):
            if there > there_before:
                shares.append(min(1.0, max(0.0, (used - used_before) / (there - there_before))))
        self._share = max(shares) if shares else None
        return self._share

    def _read(self) -> list[tuple[float, float]]:
        """Seconds of a core that were used, and that there were: of the cores, then of the container's quota."""
        found = []
        with contextlib.suppress(OSError, ValueError, IndexError):  # another system, or a hardened one
            found.append(self._of_cores())
        with contextlib.suppress(OSError, ValueError, IndexError):  # no quota, or version 1 of cgroups
            found.append(self._of_quota())
        return found

    def _of_cores(self) -> tuple[float, float]:
        used = there = 0
        for line in (self._root / "proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in self._cores:
                ticks = [int(field) for field in fields[:8]]
                there += sum(ticks)
                used += sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
        if not there:
            raise ValueError("no core in /proc/stat")
        return used / _HERTZ, there / _HERTZ

    def _of_quota(self) -> tuple[float, float]:
        group = self._root / "sys/fs/cgroup"
        quota, period = (group / "cpu.max").read_text().split()
        said = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(said["usage_usec"]) / 1e6, self._clock.monotonic() * int(quota) / int(period)
