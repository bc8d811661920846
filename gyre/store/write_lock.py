"""Who holds SQLite's write lock, by the kernel's own table.

A process that is stopped in the middle of a transaction keeps the lock for as long as it stands. In WAL mode it is a
POSIX lock on one byte of the file `-shm`. The file is not opened to look: POSIX drops all locks of a process on a file
when any descriptor of it is closed, those of our own connections too.

This file must not know what is done about it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

WRITE_LOCK_BYTE = 120
"""`WAL_WRITE_LOCK`, the first lock of the index: https://sqlite.org/walformat.html#wal_locks."""

LOCKS = Path("/proc/locks")


def holder_of(database: Path) -> int | None:
    """The process that writes to this SQLite database, or waits to be let go on in the middle of it; None where nobody
    does, or that cannot be told: on another machine, outside this container, or without Linux's /proc."""
    try:
        shared = os.stat(f"{database}-shm")
        return holder_in(LOCKS.read_text(), shared.st_dev, shared.st_ino)
    except OSError:  # nobody has the database open, or this kernel has no such table
        return None


def holder_in(locks: str, device: int, inode: int) -> int | None:
    """The same by the text of proc_locks(5): `1: POSIX  ADVISORY  WRITE 3568 fd:00:2531452 120 120`. Who waits for a
    lock has an arrow after the number."""
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[3] != "WRITE" or fields[5] != file:
            continue
        with contextlib.suppress(ValueError):  # a lock to the end of a file ends with `EOF`
            first, last, pid = int(fields[6]), int(fields[7]), int(fields[4])
            if first <= WRITE_LOCK_BYTE <= last and pid > 0:  # 0: of another namespace
                return pid
    return None


def described(pid: int) -> str:
    """`process 3568 (gyre stop j1), which is stopped`, for a message."""
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended since
        return f"process {pid}"
    stands = ", which is stopped (kill -CONT lets it go on)" if state in "Tt" else ""
    return f"process {pid} ({command[:80]}){stands}"
