"""The ranks of one role as collective peers over Gloo; with one rank, nothing at all.

Invariants:
- *every wait has a deadline*: a peer that is gone turns into an error after `timeout_s`, never into a hang;
- *same order*: every rank makes the same calls in the same order.

This module must not know what is reduced. `Peers` is the `Ranks` of `gyre.workloads.learner.backend` where each rank
holds the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from gyre.rollouts.samples import Group
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.rendezvous import join


class Peers:
    """A process group of its own for `context`'s ranks, with rank 0's store at `master_addr:master_port`."""

    def __init__(self, context: WorkloadContext, timeout_s: float) -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self._joined = False
        if self.world_size == 1:
            return
        join(context, "gloo", timeout_s)
        self._joined = True

    @property
    def replica(self) -> int:
        """Each rank has a copy of the model."""
        return self.rank

    @property
    def replica_count(self) -> int:
        return self.world_size

    speaks_for_samples = True
    speaks_for_losses = True

    def pool_shares(self, groups: Sequence[Group]) -> list[Group]:
        """The rank's own."""
        return list(groups)

    def any(self, flag: bool) -> bool:
        """The rank's own: it computes alone."""
        return flag

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64; the same bits on each."""
        total = torch.tensor(values, dtype=torch.float64)
        self.all_reduce_sum(total)
        return total.tolist()

    def from_first(self, text: str) -> str:
        """The first rank's text, on every rank."""
        return self.exchange(text.encode())[0].decode()

    def all_reduce_sum(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by its sum over the ranks, the same bits on every rank."""
        if self._joined:
            dist.all_reduce(buffer)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by rank 0's."""
        if self._joined:
            dist.broadcast(buffer, src=0)

    def exchange(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes, by rank."""
        if not self._joined:
            return [blob]
        return exchange_bytes(blob, self.world_size)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def exchange_bytes(blob: bytes, count: int, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Everybody's bytes among the `count` ranks of `group` (None: all), in the order of its ranks. By CPU tensors, for
    nothing that comes from a peer is unpickled."""
    mine = torch.tensor([len(blob)])
    sizes = [torch.zeros_like(mine) for _ in range(count)]
    dist.all_gather(sizes, mine, group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    if blob:
        padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    blobs = [torch.zeros_like(padded) for _ in range(count)]
    dist.all_gather(blobs, padded, group=group)
    return [got[: int(size)].numpy().tobytes() for got, size in zip(blobs, sizes, strict=True)]
