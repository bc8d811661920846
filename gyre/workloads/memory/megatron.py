"""What Megatron's ranks take, by the job's settings. This module must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gyre.config.sections import MegatronSettings, WorkloadSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory.host import FLOAT, SLOTS, KeptBytes
from gyre.workloads.memory.learners import width_of
from gyre.workloads.memory.parameters import parameters_of
from gyre.workloads.memory.rank import RankMemory, megatron_ranks


def whole(layout: MegatronSettings) -> MegatronSettings:
    """The layout of a model that is not trained: all of it on each vertex."""
    return layout.model_copy(
        update={"tensor_parallel": 1, "pipeline_parallel": 1, "sequence_parallel": False}
    )


def ranks(
    shape: Architecture, settings: WorkloadSettings, *, ranks: int, trains: bool, values: bool, on_gpu: bool
) -> Sequence[RankMemory]:
    layout = settings.megatron
    if not trains:
        ranks, layout = 1, whole(layout)
    width = width_of(layout, on_gpu=on_gpu)
    if values:
        shape = replace(shape, tied=False)
    return megatron_ranks(shape, layout, ranks=ranks, width=width, trains=trains, values=values)


def host(
    shape: Architecture, settings: WorkloadSettings, *, ranks: int, width: int, values: bool
) -> KeptBytes:
    layout = settings.megatron
    numbers = parameters_of(shape, values=values).total
    states = 3 * FLOAT if width != FLOAT else 2 * FLOAT
    checkpoint = (width + states) * numbers
    copy = layout.tensor_parallel * layout.pipeline_parallel
    buffer = checkpoint // ranks
    if layout.memory_checkpoint_share:
        share = max(1, ranks // copy) if layout.distributed_optimizer else 1
        buffer = SLOTS * (width + states // share) * numbers // copy
    return KeptBytes(buffer, width * numbers, checkpoint)
