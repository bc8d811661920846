"""A whole model's weights in host memory: what is published after a step, so that asking for it later concerns nobody
else.

This module must not know who asks, or how weights come together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor

from gyre.workloads.learner.snapshot_buffers import SnapshotBuffers

Named = Iterator[tuple[str, Tensor]]


def snapshot_of(weights: Named, buffers: SnapshotBuffers) -> dict[str, Tensor]:
    """Copies of the tensors in a free buffer, which nothing changes while anybody has them. One tensor at a time is
    whole on a device; copies to the host overlap with the gathering of the next ones."""
    buffer, held, on_device = buffers.take(), {}, False
    for name, tensor in weights:
        host = buffer.place(name, tensor.shape, tensor.dtype)
        held[name] = host.copy_(tensor.detach(), non_blocking=True)
        on_device = on_device or tensor.is_cuda
    if on_device:
        torch.cuda.current_stream().synchronize()
    return held


def checksum_of(weights: Named) -> str:
    """xxh3-128 over names and bytes of the tensors, "" where there are none; nothing is kept."""
    digest, some = xxhash.xxh3_128(), False
    for name, tensor in weights:
        some = True
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest() if some else ""
