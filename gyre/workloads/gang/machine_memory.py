"""This machine's memory, as whoever keeps copies of a rank's state in it uses it.

This module must not know what is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from torch import Tensor

LEFT_FREE = 0.1
"""Share of the machine's memory that stays free, so that the kernel does not kill a process for lack of memory."""


class MachineMemory:
    """Of a machine whose states are copied by its CPU, which needs no memory page-locked."""

    def available(self) -> tuple[int, int]:
        """Available and total memory in bytes, of the machine or its container."""
        return available_memory()

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Page-lock a buffer's memory for copies to and from a device. What is returned undoes it."""
        return lambda: None

    def copy(self, into: Tensor, of: Tensor) -> None:
        """Copy where both are in host memory."""
        into.copy_(of)


def available_memory() -> tuple[int, int]:
    """Available and total memory, of the machine or of its container if that has a lower limit."""
    memory = psutil.virtual_memory()
    return min([(memory.available, memory.total), *allowed()])


def allowed(
    own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """The free memory and the limit, in bytes, of each limited control group of this process. Inactive file pages count
    as free, because the kernel drops them when memory is needed."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no control groups here
        return []
    found = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if not controllers:
            found += _left_by(mounted, inside, _Group("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            # In version 1 a limit of 2**63, rounded to a page, means none.
            old = _Group("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += [one for one in _left_by(mounted / "memory", inside, old) if one[1] < 2**62]
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """The names of a control group's files, and of a line in its `memory.stat`."""

    limit: str
    used: str
    inactive: str


def _left_by(root: Path, inside: str, names: _Group) -> list[tuple[int, int]]:
    """Free memory and limit of the group `inside` and those above it, as far as they are mounted at `root`: a container
    may see only its own."""
    found = []
    group = root / inside.strip("/")
    for path in (group, *group.parents):
        if not path.is_relative_to(root):
            break
        try:
            limit = int((path / names.limit).read_text())
            used = int((path / names.used).read_text())
            facts = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
            found.append((max(0, limit - used + int(facts[names.inactive])), limit))
        except (OSError, ValueError, KeyError):  # "max", or the root, which has none
            continue
    return found
