"""What a rank does in a process of its own with its place in host memory."""

from __future__ import annotations

from pathlib import Path

import torch

from gyre.workloads.gang.host_memory import HostMemory


def come_and_go(rank: int, world_size: int, port: int, root: Path) -> None:
    """Again and again: takes its place, keeps a state there, and lets go of it."""
    state = [("weight", torch.full((4,), float(rank)))]
    for step in range(150):
        memory = HostMemory("job", rank, root=root)
        memory.save(state, lineage="one", step=step, book={})
        memory.settle()
        (record,) = memory.records()
        assert record.step == step, record
        assert memory.load(record, [("weight", torch.zeros(4))]), record
        memory.close(keep=False)
