"""The ranks of a learner by the job's settings: what the rooms beside this one and `gyre plan` ask.

This module must not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gyre.config.sections import FsdpSettings, MegatronSettings, WorkloadSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory.rank import PATH_KEYS, Rank, fsdp_rank, megatron_ranks

Backend = Literal["megatron", "fsdp"]

WIDTHS = {"bfloat16": 2, "float32": 4}
"""Bytes of a number, by dtype."""


def width_of(section: MegatronSettings | FsdpSettings, *, on_gpu: bool) -> int:
    """As `gyre.workloads.learner.devices.dtype_of`."""
    dtype = section.dtype
    return WIDTHS[("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype]


def ranks_of(
    backend: Backend,
    shape: Architecture,
    settings: WorkloadSettings,
    *,
    ranks: int,
    trains: bool = True,
    values: bool = False,
    on_gpu: bool = True,
) -> list[Rank]:
    """Those of a gang of `ranks` that differ. A model that is not trained is whole on each vertex."""
    section = settings.megatron if backend == "megatron" else settings.fsdp
    path_keys = (
        min(PATH_KEYS, settings.sampling.n + 1) if section.prompts_once and settings.sampling.n > 1 else 1
    )
    if backend == "megatron":
        layout = settings.megatron
        if not trains:
            ranks, layout = 1, whole(layout)
        width = width_of(layout, on_gpu=on_gpu)
        if values:
            shape = replace(shape, tied=False)
        found = megatron_ranks(shape, layout, ranks=ranks, width=width, trains=trains, values=values)
        return [replace(one, path_keys=path_keys) for one in found]
    rank = fsdp_rank(
        shape,
        settings.fsdp,
        ranks=ranks if trains else 1,
        width=width_of(settings.fsdp, on_gpu=on_gpu),
        lora=settings.lora,
        trains=trains,
        values=values,
    )
    return [replace(rank, path_keys=path_keys)]


def whole(layout: MegatronSettings) -> MegatronSettings:
    """The layout of a model that is not trained: all of it on each vertex."""
    return layout.model_copy(
        update={"tensor_parallel": 1, "pipeline_parallel": 1, "sequence_parallel": False}
    )
