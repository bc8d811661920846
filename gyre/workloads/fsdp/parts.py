"""What one rank's state is made of: each tensor that a later step depends on, and what it is of the whole one.

This module must not know where states are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gyre.workloads.fsdp.shards import Shards, local_of

WEIGHT = "weight"
RANDOM = "random"
UPDATES = "updates"
MOMENTS = ("exp_avg", "exp_avg_sq")
_CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class FsdpPart:
    """`tensor` is elements `start` to `end` of a flattened whole tensor of a `shape`. `what` is `weight` or the name of
    an optimizer's state of the model's tensor `key`. Of `random` states, `what` is the device and the rank."""

    key: str
    what: str
    tensor: Tensor
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.key}/{self.what}"


def parts_of(shards: Shards, moments: Mapping[str, Mapping[str, Any]]) -> list[FsdpPart]:
    """The weights; of each parameter in `moments` its optimizer's; and the random states."""
    found = [_part(shards, name, WEIGHT, shards.local(name)) for name in shards.tensors]
    for name, state in moments.items():
        found += [_part(shards, name, what, local_of(state[what])) for what in MOMENTS]
    return found + _random_parts(shards)


def updates_part(updates: int) -> FsdpPart:
    """The number of optimizer steps, where it is kept beside the tensors."""
    return FsdpPart(UPDATES, UPDATES, torch.tensor([updates]), (1,), 0, 1)


def updates_in(parts: Iterable[FsdpPart]) -> int:
    """What `updates_part` holds."""
    (found,) = (part for part in parts if part.key == UPDATES)
    return int(found.tensor)


def _random_parts(shards: Shards) -> list[FsdpPart]:
    """The states that random numbers are drawn from, which a user's loss may do. They are copies."""
    states = {"cpu": torch.get_rng_state()}
    if any(shards.local(name).device.type == _CUDA for name in shards.tensors):
        states[_CUDA] = torch.cuda.get_rng_state()
    return [
        FsdpPart(RANDOM, f"{device} {shards.rank}", state, tuple(state.shape), 0, len(state))
        for device, state in states.items()
    ]


def take_random(parts: Iterable[FsdpPart]) -> None:
    """Draw from these random states from now on."""
    for part in parts:
        if part.key == RANDOM:
            take = torch.cuda.set_rng_state if part.what.startswith(_CUDA) else torch.set_rng_state
            take(part.tensor)


def written_by(parts: Iterable[FsdpPart], rank: int) -> list[FsdpPart]:
    """What this rank writes: its shards, its random states, and on the first rank what every rank has."""
    return [
        part
        for part in parts
        if part.key == RANDOM or rank == 0 or part.end - part.start < math.prod(part.shape)
    ]


def _part(shards: Shards, name: str, what: str, local: Tensor) -> FsdpPart:
    shape = shards.shape(name)
    row = math.prod(shape[1:])
    start, end = shards.rows(name)
    return FsdpPart(name, what, local, shape, start * row, end * row if shape else 1)
