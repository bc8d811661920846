"""The ranks of a learner by the job's settings: what the rooms beside this one and `gyre plan` ask.

This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from gyre.config.sections import FsdpSettings, MegatronSettings, WorkloadSettings
from gyre.graph.backends import backend_named
from gyre.models.architecture import Architecture
from gyre.workloads.memory.rank import PATH_KEYS, RankMemory

WIDTHS = {"bfloat16": 2, "float32": 4}
"""Bytes of a number, by dtype."""


def width_of(section: MegatronSettings | FsdpSettings, *, on_gpu: bool) -> int:
    """As `gyre.workloads.learner.devices.dtype_of`."""
    dtype = section.dtype
    return WIDTHS[("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype]


def ranks_of(
    backend: str,
    shape: Architecture,
    settings: WorkloadSettings,
    *,
    ranks: int,
    trains: bool = True,
    values: bool = False,
    on_gpu: bool = True,
) -> list[RankMemory]:
    """Those of a gang of `ranks` that differ. A model that is not trained is whole on each vertex."""
    section = section_of(backend, settings)
    path_keys = (
        min(PATH_KEYS, settings.sampling.n + 1) if section.prompts_once and settings.sampling.n > 1 else 1
    )
    found: Sequence[RankMemory] = foretold_by(backend).ranks(
        shape, settings, ranks=ranks, trains=trains, values=values, on_gpu=on_gpu
    )
    return [replace(one, path_keys=path_keys) for one in found]


def section_of(backend: str, settings: WorkloadSettings) -> MegatronSettings | FsdpSettings:
    """How the ranks of a back end compute."""
    found: MegatronSettings | FsdpSettings = getattr(settings, backend_named(backend).section)
    return found


def foretold_by(backend: str) -> Any:
    """The module beside this one that knows what the ranks of a back end take."""
    return import_module(backend_named(backend).memory)


def is_foretold(backend: str, settings: WorkloadSettings) -> bool:
    """Whether the memory of its ranks on a GPU is known: not with another attention than the back end's own choice."""
    return getattr(section_of(backend, settings), "attention", "auto") == "auto"
