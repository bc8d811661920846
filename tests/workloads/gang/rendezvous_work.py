"""What the ranks of a meeting do, in processes of their own."""

from __future__ import annotations

import time

import torch.distributed as dist

from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang import rendezvous


def meet(rank: int, ranks: int, port: int, late_s: float) -> float:
    """Join; the last rank is late in making its group. Returns when the rank went on, by the machine's clock."""
    made = rendezvous.dist.init_process_group

    def slow(*given: object, **named: object) -> None:
        made(*given, **named)  # type: ignore[arg-type]
        if rank == ranks - 1:
            time.sleep(late_s)

    rendezvous.dist.init_process_group = slow
    try:
        context = WorkloadContext("j", "actor", rank, ranks, master_addr="127.0.0.1", master_port=port)
        rendezvous.join(context, "gloo", 60.0)
        return time.monotonic()
    finally:
        rendezvous.dist.init_process_group = made
        if dist.is_initialized():
            dist.destroy_process_group()
