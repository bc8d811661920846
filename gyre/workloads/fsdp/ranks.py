"""The ranks of an FSDP2 role: each has samples of its own, so each is a replica, and none computes without the others.

Invariants:
- *every wait has a deadline*: a peer that is gone turns into an error after `timeout_s`, never into a hang;
- *bytes, not objects*: what ranks tell each other is numbers or bytes; nothing is unpickled;
- *no device is waited for*: what is said here goes over Gloo in host memory, whatever the model is on.

This module must not know about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gyre.errors import ConfigError
from gyre.rollouts.samples import Group
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.peers import exchange_bytes
from gyre.workloads.gang.rendezvous import join


class FsdpRanks:
    """Joins the group of `context`'s ranks; `close` leaves it. `mesh` has one dimension: all of them. Raises
    ConfigError, RanksMissing."""

    def __init__(self, context: WorkloadContext, *, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size = context.rank, context.world_size
        self.replica, self.replica_count = context.rank, context.world_size
        if dist.is_initialized():
            raise ConfigError(
                "This process is in a process group already.",
                hint="A role of FSDP2 needs processes of its own.",
            )
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if self.world_size == 1:
            dist.init_process_group(
                backend, store=_store_of_one(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
            )
        else:
            join(context, backend, timeout_s)
        self._joined = True
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

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64; the same bits on each."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Replace a buffer in host memory by the first rank's."""
        dist.broadcast(buffer, src=0)

    def from_first(self, text: str) -> str:
        """The first rank's text, on every rank."""
        length = torch.tensor([len(text.encode())])
        dist.broadcast(length, src=0)
        blob = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0 and text:
            blob = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        dist.broadcast(blob, src=0)
        return blob.numpy().tobytes().decode()

    def exchange(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes, by rank."""
        return exchange_bytes(blob, self.world_size)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()


def _store_of_one() -> Any:
    """Nobody else has to find it."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()
