"""What other roles have on a device that they share with a learner: as `gyre plan` and the learner's ranks count it.

Invariant *known or said*: of a role whose memory is not foretold there is None, not a guess.

This module must not import torch, nor know how roles come to share a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gyre.config.sections import WorkloadSettings
from gyre.graph.backends import back_end_of
from gyre.models.architecture import Architecture
from gyre.rollouts.engines import known_engine
from gyre.workloads.memory.engine import engine_need
from gyre.workloads.memory.learners import is_foretold, ranks_of, section_of
from gyre.workloads.memory.passes import CONTEXT, LEAST, need
from gyre.workloads.memory.rank import PassSize

if TYPE_CHECKING:
    from gyre.graph.devices import Neighbour

_KINDS = {"Actor": (True, False), "Critic": (True, True), "Reference": (False, False)}
"""By how the class's name ends: whether it trains, and whether its model has values. A reward model is of another
folder."""

_ON_CPUS = ("gyre.workloads.torch", "gyre.workloads.rewards")
"""Packages whose classes take nothing of a GPU."""


def backend_of(module: str, name: str) -> str | None:
    """The name of the back end whose memory is foretold, and whose learner or frozen copy of the job's model the class
    is; None of another."""
    found = back_end_of(module) if any(name.endswith(kind) for kind in _KINDS) else None
    return found.name if found is not None and found.memory else None


def kind_of(name: str) -> tuple[bool, bool]:
    """Whether a class that has a `backend_of` trains, and whether its model has values."""
    return next(kind for end, kind in _KINDS.items() if name.endswith(end))


def beside(
    neighbours: Sequence[Neighbour],
    shape: Architecture,
    settings: WorkloadSettings,
    device_bytes: int | None,
    *,
    recompute: Mapping[str, bool] | None = None,
) -> dict[str, int | None]:
    """Bytes that each neighbour has of a device while a learner computes there, by role; None where that is not known.

    `recompute` is what roles are known to do; any other whose setting is `auto` is counted with its activations kept,
    so that roles which decide by each other's numbers fit together, whatever each comes to.
    """
    known = recompute or {}
    return {
        one["role"]: _engine(one, shape, device_bytes)
        if one["engine"]
        else _model(one, shape, settings, known.get(one["role"]))
        for one in neighbours
    }


def _engine(one: Neighbour, shape: Architecture, device_bytes: int | None) -> int | None:
    """Between its windows a local engine has its weights alone; any other has all that it took."""
    kind = known_engine(one["engine"])
    found = engine_need(shape, one["engine_args"], kind.memory if kind is not None else None)
    if found is None:
        return None
    if one["local"]:
        return found.weights + CONTEXT
    if found.fraction is None or device_bytes is None:
        return None
    return int(max(found.weights, found.fraction * device_bytes)) + CONTEXT


def _model(
    one: Neighbour, shape: Architecture, settings: WorkloadSettings, recompute: bool | None
) -> int | None:
    if any(_is_in(one["module"], package) for package in _ON_CPUS):
        return 0
    backend = backend_of(one["module"], one["name"])
    if backend is None:
        return None
    section = section_of(backend, settings)
    if section.device == "cpu":
        return 0
    if not is_foretold(backend, settings):
        return None
    trains, values = kind_of(one["name"])
    ranks = ranks_of(backend, shape, settings, ranks=one["total"], trains=trains, values=values)
    if recompute is not None:
        ranks = [replace(rank, recompute=recompute) for rank in ranks]
    longest = settings.longest_answer
    tokens = LEAST if section.pass_tokens == "auto" else section.pass_tokens
    part = PassSize.of(max(tokens, longest), longest)
    return need(ranks, part, several=one["total"] > 1 and trains).total


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
