"""What tests make on the machine itself, outside their own folders: small disks, control groups, folders below /tmp
and in shared memory.

Invariants:
- *bounded*: every disk has a size, and is memory that is freed with it;
- *owned*: a name holds the process that made the thing, by pid and start time, so that a reused pid owns nothing;
- *swept*: what a dead process left is removed by `sweep`, which a run of the suite calls before its first test.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PLACE = Path("/tmp")
"""Not below `tmp_path`: another user may have to enter, and Ray's sockets want a short path."""

SHARED_MEMORY = Path("/dev/shm")
"""What stays there takes memory until somebody removes it."""

GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
"""Where control groups of version 1 and 2 limit memory, and the file of the limit."""

MOUNT_S = 10.0
MOST_BYTES = 1 << 30
"""No test fills a disk that is larger: it would be the machine's own."""
EMPTY_S = 5.0
"""For a control group's processes to be gone after they were killed."""

_NAME = re.compile(r"gt\.[a-z]+\.(\d+)\.(\d+)(\.[\w-]+)?")


def started(pid: int) -> int:
    """When the process started, in the kernel's ticks since the machine did; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has gone, or this is no Linux
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def owned_name(kind: str) -> str:
    """A name for a thing of this process; `kind` is a short word in small letters."""
    return f"gt.{kind}.{os.getpid()}.{started(os.getpid())}"


def is_abandoned(name: str) -> bool:
    """Whether the name is one of `owned_name`'s, and its owner is no more."""
    found = _NAME.fullmatch(name)
    return found is not None and started(int(found[1])) != int(found[2])


@contextlib.contextmanager
def owned_folder(kind: str, place: Path = PLACE) -> Iterator[Path]:
    """A folder in `PLACE` or `SHARED_MEMORY` that everybody may enter; it goes with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{owned_name(kind)}.", dir=place))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def memory_folder(kind: str) -> contextlib.AbstractContextManager[Path]:
    """An `owned_folder` in shared memory where there is such a place, else below /tmp."""
    return owned_folder(kind, SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else PLACE)


class SmallDisk:
    """A mounted file system of its own, in memory."""

    def __init__(self, path: Path, size_kb: int) -> None:
        """Raises CalledProcessError where mounting is not permitted."""
        self.path = path
        _mount(path, f"size={size_kb}k")

    @property
    def used_kb(self) -> int:
        status = os.statvfs(self.path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize // 1024

    def resize(self, size_kb: int) -> None:
        _mount(self.path, f"size={size_kb}k,remount")

    def fill(self) -> None:
        """Leave no room, without a byte written: the disk becomes as small as what it holds."""
        for _ in range(20):
            with contextlib.suppress(subprocess.CalledProcessError):  # somebody wrote meanwhile
                self.resize(max(self.used_kb, 4))
                return
        raise TimeoutError(f"{self.path} grew whenever it was to be full")

    def close(self) -> None:
        unmount(self.path)


@contextlib.contextmanager
def small_disk(size_kb: int) -> Iterator[SmallDisk]:
    """A file system of this size, which everybody may enter. Skips the test where mounting is not permitted."""
    with owned_folder("disk") as folder:
        path = folder / "disk"
        path.mkdir()
        try:
            disk = SmallDisk(path, size_kb)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("mounting is not permitted here")
        try:
            yield disk
        finally:
            disk.close()


def fill(file: Path, *, leave_bytes: int = 0) -> None:
    """Take all room of the file's disk but so much, with this file. Only for a `small_disk`."""
    assert os.statvfs(file.parent).f_blocks * os.statvfs(file.parent).f_frsize <= MOST_BYTES, file
    with file.open("ab", buffering=0) as ballast:
        while (free := os.statvfs(file).f_bavail * os.statvfs(file).f_frsize) > leave_bytes:
            try:
                ballast.write(bytes(max(1, min(1 << 20, free - leave_bytes))))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return


def unmount(path: Path) -> None:
    """Take it off at once, whoever still has files open there."""
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True, timeout=MOUNT_S)


def _mount(path: Path, options: str) -> None:
    words = ["mount", "-t", "tmpfs", "-o", f"mode=755,{options}", "gyre-test", str(path)]
    subprocess.run(words, check=True, capture_output=True, timeout=MOUNT_S)


class ControlGroup:
    """A control group of its own, without a limit at first."""

    def __init__(self, path: Path, limit: str) -> None:
        self.path = path
        self._limit = path / limit

    def take(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def starve(self) -> None:
        """Let it have no page more."""
        while True:
            used = self.path / "memory.usage_in_bytes"  # version 1 takes no limit below it
            try:
                self._limit.write_text(used.read_text() if used.exists() else "0")
                return
            except OSError as error:  # it has taken more meanwhile
                if error.errno != errno.EBUSY:
                    raise

    def hold(self, limit_bytes: int) -> None:
        """Let it have so much, and stand still where it wants more, until `release`: nobody is killed. Skips the test
        where that cannot be had."""
        control, high = self.path / "memory.oom_control", self.path / "memory.high"
        if control.exists():  # version 1
            control.write_text("1")
            self._limit.write_text(str(limit_bytes))
        elif high.exists():
            high.write_text(str(limit_bytes))
        else:
            pytest.skip(f"control groups do not hold their processes here: {high} is missing")

    def release(self) -> None:
        high = self.path / "memory.high"
        if high.exists():
            high.write_text("max")
        else:
            self._limit.write_text("-1")


@contextlib.contextmanager
def control_group() -> Iterator[ControlGroup]:
    """Whoever is still in it when the block ends is killed. Skips the test where groups cannot be made."""
    root, limit = GROUPS[0] if GROUPS[0][0].is_dir() else GROUPS[1]
    path = root / owned_name("group")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        if not (path / limit).exists():
            pytest.skip(f"control groups do not limit memory here: {path / limit} is missing")
        yield ControlGroup(path, limit)
    finally:
        _remove_group(path)


def _remove_group(path: Path) -> None:
    deadline = time.monotonic() + EMPTY_S
    while True:
        for pid in map(int, (path / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the kernel says who is in the group, now
        try:
            path.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def sweep() -> list[str]:
    """Remove what dead processes left on the machine. Returns the paths."""
    swept = []
    for mount in _mounts():
        if any(is_abandoned(part) for part in mount.parts):
            unmount(mount)
            swept.append(str(mount))
    for root, _ in GROUPS:
        for group in root.glob("gt.*"):
            if is_abandoned(group.name):
                with contextlib.suppress(OSError):  # another run sweeps, too
                    _remove_group(group)
                    swept.append(str(group))
    for path in (*PLACE.glob("gt.*"), *SHARED_MEMORY.glob("gt.*")):
        if is_abandoned(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            swept.append(str(path))
    return swept


def _mounts() -> list[Path]:
    """Of this process's view, the innermost first."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # no Linux
        return []
    return [Path(line.split()[4]) for line in reversed(lines)]
