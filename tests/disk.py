"""What fsync has put on the disk, in the process that watches it, if nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[tuple[int, int], int] = {}
        """The last change of each file or folder when it was synced last, by device and inode; in nanoseconds."""
        fsync = os.fsync

        def watched(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self._synced[status.st_dev, status.st_ino] = status.st_mtime_ns

        monkeypatch.setattr(os, "fsync", watched)

    def missing(self, folder: Path) -> list[str]:
        """Which of the folder and all below it are not as they stand on the disk."""
        inside = [Path(at) / name for at, folders, names in os.walk(folder) for name in [*folders, *names]]
        return [str(path) for path in [folder, *inside] if not self.has(path)]

    def has(self, path: Path) -> bool:
        """Whether a file's bytes, or the names in a folder, are on the disk."""
        status = path.stat()
        return self._synced.get((status.st_dev, status.st_ino), -1) >= status.st_mtime_ns
