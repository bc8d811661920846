"""What the ledger calls stored is on the disk by then, bytes and names: a machine may lose its power after that.

Of Megatron's checkpoints: `tests/megatron/checkpoints/test_checkpoint.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.workloads.trainer.groups.group_state import GroupState
from tests.disk import Disk
from tests.workloads.test_in_process import DEADLINE_S, TORCH

PPO = TORCH | {
    "recipe": "ppo",
    "roles": {**TORCH["roles"], "critic": {}},
    "config": {**TORCH["config"], "critic": {"optim": {"lr": 1e-3}}},
}
"""The critic's part of a checkpoint is in a folder of its own."""


def test_a_checkpoint_is_on_the_disk_before_the_ledger_hears_of_it(
    make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, seen = Disk(monkeypatch), []
    record = GroupState.record_checkpoint

    def watched(self: GroupState, step: int, path: Path, **what: Any) -> None:
        seen.append((step, disk.missing(path), disk.has(path.parent)))
        record(self, step, path, **what)

    monkeypatch.setattr(GroupState, "record_checkpoint", watched)
    with make_job(PPO) as job:
        job.result(timeout_s=DEADLINE_S)
    assert seen == [(step, [], True) for step in (0, 2, 4)]
