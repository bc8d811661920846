"""What a rank does with its device's memory: how many tokens its passes have, and whether activations are kept. It is
what the job says, or for `auto` what fits the devices of all ranks.

This module must not know what a pass is computed by, beyond the back end's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture, architecture_of
from gyre.models.errors import ModelFolderError
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.devices import device_bytes
from gyre.workloads.memory.beside import beside
from gyre.workloads.memory.choice import PassChoice, PassSettings, choose
from gyre.workloads.memory.learners import ranks_of, section_of


def choice_of(
    backend: str,
    shape: Architecture | None,
    settings: WorkloadSettings,
    context: WorkloadContext,
    device: torch.device,
    *,
    ranks: int,
    exchange: Callable[[bytes], list[bytes]],
    trains: bool = True,
    values: bool = False,
) -> PassChoice:
    """The same on all `ranks`: that of the smallest of their devices. `shape` is None where it is not known; `exchange`
    gives everybody's bytes, by rank. Activations of a model that is not trained are never kept, nor computed again. A
    call of all ranks."""
    section = section_of(backend, settings)
    asked = PassSettings(section.pass_tokens, section.recompute if trains else False)
    own = room = device_bytes(device)
    if asked.is_auto:
        told = [int(one) for one in exchange(str(own or 0).encode())]
        room = min(told) or None
    found = others = None
    if shape is not None and room is not None and asked.is_auto:
        found = ranks_of(backend, shape, settings, ranks=ranks, trains=trains, values=values)
        others = beside(context.neighbours, shape, settings, room)
    longest = settings.longest_answer
    choice = choose(asked, found, room, longest=longest, several=ranks > 1 and trains, beside=others)
    choice = replace(choice, by_another=room != own)
    if choice.said:
        print(choice.said, flush=True)
    return choice


def now_said(choice: PassChoice, *, recompute: bool) -> str:
    """What was chosen, for a rank's status, where it may compute activations again by now."""
    if choice.recompute or not recompute:
        return choice.said
    return f"{choice.said}. They are computed again since a pass did not fit"


def known_shape(config: dict[str, Any], *, attention: str = "auto") -> Architecture | None:
    """The shape in a `config.json`, whose memory is foretold; None of another model, and with an implementation of
    attention that is not this code's."""
    if attention != "auto":
        return None
    try:
        return architecture_of(config, "config.json")
    except ModelFolderError:
        return None
