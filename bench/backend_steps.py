"""Passes for a back end, and steps of them: what benches of back ends without a job have in common."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from memory_gpu import LONGEST, PROMPT, SMALL

PASSES = 8
WIDEST = 8192
"""Tokens of the passes of a step, at most: they are of eight widths, as a job's are."""

WIDEST_DRY = 512
"""The same on CPUs, where nothing is measured."""


def passes_of(drawn: np.random.Generator, *, widest: int, multiple: int) -> list[Any]:
    """Eight passes of up to `widest` tokens, of sequences of any length."""
    from gyre.workloads.learner.packing import TrainingRow as Sequence
    from gyre.workloads.learner.packing import pack

    parts: list[Any] = []
    for _ in range(PASSES):
        rows, left = [], widest
        while left > LONGEST:
            length = int(drawn.integers(PROMPT + 2, LONGEST))
            prompt = drawn.integers(0, SMALL, PROMPT).astype(np.int32)
            rows.append(Sequence(prompt, drawn.integers(0, SMALL, length - PROMPT + 1).astype(np.int32)))
            left -= length
        parts += list(pack(rows, max_tokens=widest, multiple=multiple))
    return parts


def step(backend: Any, parts: list[Any], *, together: int) -> float:
    """Seconds of all passes, of which a micro-batch has so many `together`, and of an optimizer step."""
    import torch

    from gyre.workloads.algorithms.losses import LossSum

    def loss(part: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> LossSum:
        return LossSum(-logprobs.sum(), torch.tensor(float(len(part.targets)), device=logprobs.device), {})

    began = time.monotonic()
    backend.zero()
    for first in range(0, len(parts), together):
        backend.backward(parts[first : first + together], loss)
    backend.update(count=float(sum(len(part.targets) for part in parts)), lr=1e-6)
    return time.monotonic() - began
