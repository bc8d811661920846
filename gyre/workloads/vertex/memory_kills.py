"""How many processes the kernel has killed for want of memory.

The kernel tells nobody whom it killed, but counts: a process that was killed while the count of its control group rose
was most likely killed for its memory. Runs on the process's own host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
"""Where the control groups are mounted. A container sees its own at the root."""

WHOLE_MACHINE = Path("/proc/vmstat")

_COUNTER = "oom_kill "


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """So many `kills` were counted in the file `counter`."""

    counter: str
    kills: int


def own_memory_kills(own: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> MemoryKills | None:
    """The kills in this process's control group, or on the whole machine where it is in none. None where the kernel
    does not count them."""
    for counter in (*_of_group(own, groups), WHOLE_MACHINE):
        kills = kills_in(str(counter))
        if kills is not None:
            return MemoryKills(str(counter), kills)
    return None


def kills_in(counter: str) -> int | None:
    """The kills that a file counts; None where there is none, or it counts none."""
    try:
        lines = Path(counter).read_text().splitlines()
        return next((int(line.removeprefix(_COUNTER)) for line in lines if line.startswith(_COUNTER)), None)
    except (OSError, ValueError):
        return None


def _of_group(own: Path, groups: Path) -> list[Path]:
    """Where the kills of this process's group may be counted, by control groups of version 2 or 1."""
    found = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += [groups / path.lstrip("/") / "memory.events"]
        elif "memory" in controllers.split(","):
            # A container that is not told of its own root sees its path from the host's.
            root = groups / "memory"
            found += [root / path.lstrip("/") / "memory.oom_control", root / "memory.oom_control"]
    return found
