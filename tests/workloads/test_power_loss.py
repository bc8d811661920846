"""What the ledger calls stored is on the disk by then, bytes and names: a machine may lose its power after that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gyre.workloads.trainer.groups.group_state import GroupState
from tests.workloads.test_in_process import DEADLINE_S, TORCH


class Disk:
    """What fsync has put on the disk, if nothing else does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[tuple[int, int], float] = {}
        """When each file or folder was synced last, by device and inode; times in nanoseconds."""
        fsync = os.fsync

        def watched(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self.synced[status.st_dev, status.st_ino] = max(status.st_mtime_ns, status.st_ctime_ns)

        monkeypatch.setattr(os, "fsync", watched)

    def missing(self, folder: Path) -> list[str]:
        """What below the folder, and the folder's own name, is not as it stands on the disk."""
        inside = [Path(at) / name for at, folders, names in os.walk(folder) for name in [*folders, *names]]
        return [str(path) for path in [folder.parent, folder, *inside] if not self._has(path)]

    def _has(self, path: Path) -> bool:
        status = path.stat()
        # A folder is changed by what comes and goes in it. Its own rename changes its parent, and its own ctime.
        return self.synced.get((status.st_dev, status.st_ino), -1) >= status.st_mtime_ns


PPO = TORCH | {
    "recipe": "ppo",
    "roles": {**TORCH["roles"], "critic": {}},
    "config": {**TORCH["config"], "critic": {"optim": {"lr": 1e-3}}},
}
"""The critic's part of a checkpoint is in a folder of its own."""


@pytest.mark.parametrize(("spec", "backend"), [(PPO, "torch"), (TORCH, "megatron")])
def test_a_checkpoint_is_on_the_disk_before_the_ledger_hears_of_it(
    make_job: Any, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], backend: str
) -> None:
    disk, seen = Disk(monkeypatch), []
    record = GroupState.record_checkpoint

    def watched(self: GroupState, step: int, path: Path, **what: Any) -> None:
        seen.append((step, disk.missing(path)))
        record(self, step, path, **what)

    monkeypatch.setattr(GroupState, "record_checkpoint", watched)
    with make_job(spec | {"backend": backend}) as job:
        job.result(timeout_s=DEADLINE_S)
    assert [step for step, _ in seen] == [0, 2, 4]
    assert [missing for _, missing in seen] == [[], [], []]
