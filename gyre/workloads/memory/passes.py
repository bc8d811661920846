"""How large a pass may be on a device, and what `pass_tokens: auto` comes to.

Invariant *one rule*: `gyre plan` and a learner ask the same function, so that the plan tells the number that a rank of
such a device takes.

This module must not import torch, nor know where a device's size comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gyre.workloads.memory.rank import PassSize, RankMemory

GIB = 1 << 30

CONTEXT = 704 << 20
"""Bytes that a process has on a device beside torch's allocator: CUDA's context and the kernels that were loaded. As
measured on an H100 (`bench/results/memory_gpu.json`)."""

COMMUNICATION = 1 << 30
"""The same of NCCL, where there is more than one rank: its channels' buffers. On two H100s 0.8 GiB with FSDP2, 1.7 with
Megatron, which makes more groups."""

MARGIN = 0.08
"""Share of a device that `auto` leaves: for what is left between blocks of torch's allocator, and for what is foretold
too low."""

STEP = 1024
"""Passes are multiples of so many tokens: nobody sees a smaller difference in a step's time."""

MOST = 32768
"""Of `auto`. Kernels of such a pass keep any GPU busy, and a larger one makes the last of a step wait longer for
samples."""

LEAST = 1024
"""Of `auto`, where not even that would fit: a job halves the passes that do not fit, and says so."""

WITHOUT_A_DEVICE = 16384
"""Tokens of `auto` on CPUs, and of a model whose shape is not known here: the default of `pass_tokens`."""

_LARGEST_SEARCHED = 1 << 22


@dataclass(frozen=True, slots=True)
class Need:
    """Of a rank on its device, in bytes, at the largest: by parts, with what stands beside torch's allocator."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def need(ranks: Sequence[RankMemory], part: PassSize, *, several: bool) -> Need:
    """Of the one of the ranks that needs most. `several`: the gang has more than one."""
    parts = max((rank.peak(part) for rank in ranks), key=lambda parts: sum(parts.values()))
    beside = CONTEXT + (COMMUNICATION if several else 0)
    return Need({**parts, "context": beside})


def largest_pass(ranks: Sequence[RankMemory], room: float, *, longest: int, several: bool) -> int:
    """The most tokens, in multiples of `STEP`, of a pass that needs at most `room` bytes; 0 where none does. Sequences
    have up to `longest` tokens."""

    def fits(steps: int) -> bool:
        return need(ranks, PassSize.of(steps * STEP, longest), several=several).total <= room

    low, high = 0, _LARGEST_SEARCHED // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * STEP


def free_bytes(device_bytes: int, beside: int = 0) -> float:
    """What a rank may take of a device on which others have `beside`."""
    return (1.0 - MARGIN) * device_bytes - beside


def automatic(
    ranks: Sequence[RankMemory] | None,
    device_bytes: int | None,
    *,
    longest: int,
    several: bool,
    beside: int = 0,
) -> tuple[int, str]:
    """What `auto` comes to, and why, in words. `ranks` is None where the model's shape is not known here;
    `device_bytes` where there is no GPU; `beside` is what others have on it."""
    if ranks is None:
        return WITHOUT_A_DEVICE, "what this model needs is not known"
    if device_bytes is None:
        return WITHOUT_A_DEVICE, "there is no device whose memory would bound it"
    found = largest_pass(ranks, free_bytes(device_bytes, beside), longest=longest, several=several)
    if found >= MOST:
        return MOST, "the most that is of use"
    device = f"{MARGIN:.0%} of the device's {device_bytes / GIB:.0f} GiB left free"
    if found < LEAST:
        return LEAST, f"the least; with {device} none fits by what is foretold"
    return found, f"the largest that fits, {device}"


def tokens_of(
    asked: int | Literal["auto"],
    ranks: Sequence[RankMemory] | None,
    device_bytes: int | None,
    *,
    longest: int,
    several: bool,
    beside: int = 0,
) -> tuple[int, str]:
    """`pass_tokens`, and in words why it is so many; "" where the job says it."""
    if asked == "auto":
        return automatic(ranks, device_bytes, longest=longest, several=several, beside=beside)
    return asked, ""
