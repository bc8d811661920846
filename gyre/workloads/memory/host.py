"""What a learner takes of its machines' memory and of the checkpoints' disk.

This module must not import torch, nor know of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory.learners import foretold_by

FLOAT = 4

SNAPSHOTS = 2
"""Copies of the weights in the first rank's memory (`gyre.workloads.learner.snapshot_buffers.MADE_READY`)."""

VERSIONS = 3
"""Policy versions in the arena of whoever publishes them, the one that is being written among them
(`gyre.workloads.gang.weight_source.HELD`)."""

SLOTS = 2
"""States of a rank in host memory, where `memory_checkpoint_share` asks for them
(`gyre.workloads.gang.host_memory`)."""

CHECKPOINTS = 3
"""On the disk: the newest two, and the one that is being written (`gyre.workloads.trainer.learning.checkpoints`)."""


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes: of each rank's slots in memory, or where there are none its checkpoint's buffer; of what the first rank
    has besides to publish; and of one checkpoint of all ranks."""

    by_rank: int
    first_rank: int
    checkpoint: int

    @property
    def on_disk(self) -> int:
        return CHECKPOINTS * self.checkpoint


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Bytes: of what each rank keeps of a checkpoint, of a version that is published, and of one checkpoint of all
    ranks."""

    by_rank: int
    published: int
    checkpoint: int


def host_need(
    backend: str,
    shape: Architecture,
    settings: WorkloadSettings,
    *,
    ranks: int,
    width: int,
    values: bool = False,
) -> HostNeed:
    """Of a gang of `ranks`. A critic, whose model has `values`, publishes nothing."""
    kept: KeptBytes = foretold_by(backend).host(shape, settings, ranks=ranks, width=width, values=values)
    first = 0 if values else (SNAPSHOTS + VERSIONS) * kept.published
    return HostNeed(kept.by_rank, first, kept.checkpoint)
