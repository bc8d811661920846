"""The ranks of an FSDP2 role: each has samples of its own, so each is a replica, and none computes without the others.

This module must not know about models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gyre.rollouts.samples import Group
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.world import World


class FsdpRanks(World):
    """`mesh` has one dimension: all ranks."""

    def __init__(self, context: WorkloadContext, *, device: torch.device, timeout_s: float) -> None:
        super().__init__(context, device=device, timeout_s=timeout_s)
        self.replica, self.replica_count = context.rank, context.world_size
        world = dist.group.WORLD
        assert world is not None
        self.mesh = DeviceMesh.from_group(world, device.type)

    @property
    def speaks_for_samples(self) -> bool:
        return True

    @property
    def speaks_for_losses(self) -> bool:
        return True

    def pool_shares(self, groups: Sequence[Group]) -> list[Group]:
        """A replica is one rank: the groups themselves."""
        return list(groups)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum([float(flag)])[0] > 0

    def max(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        largest = torch.tensor([value])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)
