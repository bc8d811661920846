"""A whole model's weights in host memory, in Hugging Face's names: what is published after a step.

It is taken by the ranks of the first replica together and held by the first rank alone, so that asking for it later
concerns nobody else.

This module must not know who asks, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from gyre.workloads.megatron.model.hugging_face import export_weights
from gyre.workloads.megatron.model.snapshot_buffers import SnapshotBuffers
from gyre.workloads.megatron.policy import MegatronPolicy


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tensors` by name on the first rank, empty on others. Nothing changes them while anybody has them: see
    `snapshot_buffers`."""

    tensors: dict[str, Tensor]

    @classmethod
    def take(
        cls,
        policy: MegatronPolicy,
        *,
        dtype: torch.dtype | None = None,
        buffers: SnapshotBuffers | None = None,
    ) -> Snapshot:
        """A collective of all ranks. One tensor at a time is whole on a device; copies to the host overlap with the
        gathering of the next ones. The memory is a free one of `buffers`, or its own."""
        ranks = policy.ranks
        held: dict[str, Tensor] = {}
        if ranks.replica == 0:
            buffer = (buffers or SnapshotBuffers(torch.device("cpu"))).take()
            for name, tensor in export_weights(
                policy.module, policy.architecture, ranks, dtype=dtype, values=policy.values
            ):
                if ranks.rank == 0:
                    host = buffer.place(name, tensor.shape, tensor.dtype)
                    held[name] = host.copy_(tensor.detach(), non_blocking=True)
            if policy.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        return cls(held)


def checksum_of(policy: MegatronPolicy) -> str:
    """xxh3-128 over names and bytes of the whole model, on the first rank; "" on others. A collective of all ranks of
    the first replica; nothing is kept."""
    ranks = policy.ranks
    if ranks.replica != 0:
        return ""
    digest = xxhash.xxh3_128()
    for name, tensor in export_weights(policy.module, policy.architecture, ranks, values=policy.values):
        if ranks.rank == 0:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest() if ranks.rank == 0 else ""
