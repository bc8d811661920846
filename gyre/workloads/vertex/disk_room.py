"""How much room is left on the disks that a process writes to.

The look is made by a thread of its own: a network file system that hangs keeps `statvfs` for ever, and must not keep
whoever asks.

This module must not know what follows from a full disk.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 0.5
"""A process that starts writes megabytes at once: a disk that fills has to be noticed before the next start."""

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """What is left on the file system of a path. `disk` is the same for paths of one file system of one machine."""

    where: str
    disk: str
    available_bytes: int
    total_bytes: int


class DiskLook:
    """The newest look at the disks of these places, which `begin` has made again and again. `places` may be added to at
    any time."""

    def __init__(self, places: Sequence[Path] = ()) -> None:
        self.places = list(places)
        self.newest: tuple[DiskRoom, ...] = ()
        """Empty before the first look."""
        self._ended = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._go_on, name="gyre-disks", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _go_on(self) -> None:
        while not self._ended.is_set():
            self.newest = rooms_of(self.places)
            self._ended.wait(LOOK_EVERY_S)


def rooms_of(
    places: Sequence[Path], statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> tuple[DiskRoom, ...]:
    """One for each file system, in the order of the places; of one that cannot be looked at there is none."""
    found: dict[str, DiskRoom] = {}
    for place in list(places):
        try:
            disk = f"{_machine()}/{os.stat(place).st_dev}"
            if disk in found:
                continue
            seen = statvfs(place)
        except OSError:  # it is gone, or not made yet: that is another's to notice
            continue
        free = seen.f_bavail * seen.f_frsize
        if seen.f_files and not seen.f_favail:
            free = 0  # no file can be made
        found[disk] = DiskRoom(str(place), disk, free, seen.f_blocks * seen.f_frsize)
    return tuple(found.values())


def can_write(place: Path, size_bytes: int) -> bool:
    """Whether a file of this size can be written there; it is removed at once."""
    probe = place / f".gyre-room-{os.getpid()}-{time.monotonic_ns()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return False
    try:
        os.unlink(probe)  # first, so that none is left where this process is killed
        written = 0
        while written < size_bytes:
            written += os.write(descriptor, bytes(min(1 << 16, size_bytes - written)))
        os.fsync(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@functools.cache  # it is asked twice a second by each process of a job
def _machine() -> str:
    """The same for all processes that run on one kernel now."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux: there is one machine
        return ""
