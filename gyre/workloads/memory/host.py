"""What a learner takes of its machines' memory and of the checkpoints' disk.

This module must not import torch, nor know of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory.learners import Backend
from gyre.workloads.memory.parameters import adapter_of, parameters_of

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


def host_need(
    backend: Backend,
    shape: Architecture,
    settings: WorkloadSettings,
    *,
    ranks: int,
    width: int,
    values: bool = False,
) -> HostNeed:
    """Of a gang of `ranks`. A critic, whose model has `values`, publishes nothing."""
    lora, megatron = settings.lora, settings.megatron
    numbers = parameters_of(shape, values=values).total
    published = width * numbers
    if backend == "fsdp":
        if lora is not None and not values:
            numbers = shape.layers * adapter_of(shape, lora)
            published = FLOAT * numbers
        checkpoint = 3 * FLOAT * numbers
        buffer = checkpoint * (SLOTS if settings.fsdp.memory_checkpoint_share else 1) // ranks
    else:
        states = 3 * FLOAT if width != FLOAT else 2 * FLOAT
        checkpoint = (width + states) * numbers
        layout = megatron.tensor_parallel * megatron.pipeline_parallel
        replicas = max(1, ranks // layout)
        buffer = checkpoint // ranks
        if megatron.memory_checkpoint_share:
            share = replicas if megatron.distributed_optimizer else 1
            buffer = SLOTS * (width + states // share) * numbers // layout
    first = 0 if values else (SNAPSHOTS + VERSIONS) * published
    return HostNeed(buffer, first, checkpoint)
