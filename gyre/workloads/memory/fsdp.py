"""What FSDP2's ranks take, by the job's settings. This module must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory.host import FLOAT, SLOTS, KeptBytes
from gyre.workloads.memory.learners import width_of
from gyre.workloads.memory.parameters import adapter_of, parameters_of
from gyre.workloads.memory.rank import RankMemory, fsdp_rank


def ranks(
    shape: Architecture, settings: WorkloadSettings, *, ranks: int, trains: bool, values: bool, on_gpu: bool
) -> Sequence[RankMemory]:
    rank = fsdp_rank(
        shape,
        settings.fsdp,
        ranks=ranks if trains else 1,
        width=width_of(settings.fsdp, on_gpu=on_gpu),
        lora=settings.lora,
        trains=trains,
        values=values,
    )
    return [rank]


def host(
    shape: Architecture, settings: WorkloadSettings, *, ranks: int, width: int, values: bool
) -> KeptBytes:
    numbers = parameters_of(shape, values=values).total
    published = width * numbers
    if settings.lora is not None and not values:
        numbers = shape.layers * adapter_of(shape, settings.lora)
        published = FLOAT * numbers
    checkpoint = 3 * FLOAT * numbers
    return KeptBytes(
        checkpoint * (SLOTS if settings.fsdp.memory_checkpoint_share else 1) // ranks, published, checkpoint
    )
