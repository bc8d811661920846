"""All ranks of a role whose model is sharded over them, in the process's default group.

Invariants:
- *every wait has a deadline*: a peer that is gone turns into an error after `timeout_s`, never into a hang;
- *bytes, not objects*: what ranks tell each other is numbers or bytes; nothing is unpickled;
- *no device is waited for*: what is said here goes over Gloo in host memory, whatever the model is on.

This module must not know about models. What each rank is to the others is said by who inherits (`FsdpRanks`, Megatron's
`Ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gyre.errors import ConfigError
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.peers import exchange_bytes
from gyre.workloads.gang.rendezvous import join


class World:
    """Joins the group of `context`'s ranks, also where there is but one; `close` leaves it. Raises RanksMissing, and
    ConfigError where the process is in a group already."""

    def __init__(self, context: WorkloadContext, *, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size = context.rank, context.world_size
        if dist.is_initialized():
            raise ConfigError(
                "This process is in a process group already.",
                hint="A role whose ranks share a model needs processes of its own.",
            )
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if self.world_size == 1:
            dist.init_process_group(
                backend, store=_store_of_one(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
            )
        else:
            join(context, backend, timeout_s)
        self._joined = True

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
        return exchange_bytes(blob, self.world_size) if self.world_size > 1 else [blob]

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()


def _store_of_one() -> Any:
    """Nobody else has to find it."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()
