"""Small file systems of a test's own, always unmounted, and those of earlier runs that were killed."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PREFIX = "gmnt"
"""Short, for Ray's sockets."""
MOST_MIB = 1024
"""No test's file system may hold more of this machine's memory."""


def sweep() -> None:
    """Unmount what runs that no longer live have left; the owner's pid is in the name."""
    for line in Path("/proc/mounts").read_text().splitlines():
        folder = Path(line.split()[1])
        if folder.parent == Path("/tmp") and folder.name.startswith(PREFIX):
            owner = folder.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _unmount(folder)


@contextlib.contextmanager
def mounted(size_mib: float) -> Iterator[Path]:
    """A tmpfs of this size; skips the test where there is no right to mount one."""
    assert size_mib <= MOST_MIB
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
    try:
        options = f"size={int(size_mib * 1024)}k"
        try:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no right to mount a tmpfs here")
        yield folder
    finally:
        _unmount(folder)


def fill(file: Path, *, leave_bytes: int = 0) -> None:
    """Take all room of the file's disk but so much, with this file."""
    with file.open("ab", buffering=0) as ballast:
        while (free := os.statvfs(file).f_bavail * os.statvfs(file).f_frsize) > leave_bytes:
            try:
                ballast.write(bytes(max(1, min(1 << 20, free - leave_bytes))))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], check=False, capture_output=True, timeout=30)
    with contextlib.suppress(OSError):
        folder.rmdir()
