"""How many tokens a rank's passes have: what the job says, or for `auto` what fits the devices of all ranks.

This module must not know what a pass is computed by, beyond the back end's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture, architecture_of
from gyre.models.errors import ModelFolderError
from gyre.workloads.learner.devices import device_bytes
from gyre.workloads.memory.learners import Backend, ranks_of
from gyre.workloads.memory.passes import tokens_of


def pass_tokens_of(
    backend: Backend,
    shape: Architecture | None,
    settings: WorkloadSettings,
    device: torch.device,
    *,
    ranks: int,
    exchange: Callable[[bytes], list[bytes]],
    trains: bool = True,
    values: bool = False,
) -> tuple[int, str]:
    """`pass_tokens`, the same on all `ranks`, and in a sentence why; "" where the job says it. `shape` is None where it
    is not known; `exchange` gives everybody's bytes, by rank. A call of all ranks."""
    asked = (settings.megatron if backend == "megatron" else settings.fsdp).pass_tokens
    room = device_bytes(device)
    found = None
    if shape is not None and room is not None and asked == "auto":
        found = ranks_of(backend, shape, settings, ranks=ranks, trains=trains, values=values)
    longest = settings.sampling.max_new_tokens
    tokens, why = tokens_of(asked, found, room, longest=longest, several=ranks > 1 and trains)
    if not why:
        return tokens, ""
    least = min(int(one) for one in exchange(str(tokens).encode()))
    why = why if least == tokens else "another rank's device has less memory"
    said = f"passes of {least} tokens: {why}"
    print(said, flush=True)
    return least, said


def known_shape(config: dict[str, Any], *, attention: str = "auto") -> Architecture | None:
    """The shape in a `config.json`, whose memory is foretold; None of another model, and with an implementation of
    attention that is not this code's."""
    if attention != "auto":
        return None
    try:
        return architecture_of(config, "config.json")
    except ModelFolderError:
        return None
