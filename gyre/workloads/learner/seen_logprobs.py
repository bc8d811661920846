"""The policy's own log-probs of a step's samples, as its gradient passes have them anyway, kept for people to look at.

Invariants:
- *before the step*: they are of the weights that the step changes;
- *no exchange with the device of its own*: they stay where they were computed until the step is made, and then come in
  one copy;
- *in nobody's way*: they are asked for beside other calls, and a step's are forgotten when two more are made.

This module must not know about models or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEPT_STEPS = 2

Tag = tuple[int, int]
"""A group's id, and the number of a sample in it."""


class SeenLogprobs:
    def __init__(self) -> None:
        self._tags: list[Tag] = []
        self._lengths: list[int] = []
        self._parts: list[Tensor] = []
        self._made: dict[int, dict[str, NDArray[Any]]] = {}

    def forget(self) -> None:
        """What was seen of the step that is being made does not count."""
        self._tags, self._lengths, self._parts = [], [], []

    def add(self, tags: Sequence[Tag], lengths: Sequence[int], values: Tensor) -> None:
        """Samples and how many drawn tokens each has; `values` are those of all of them one after another."""
        self._tags += tags
        self._lengths += lengths
        self._parts.append(values.detach())

    def made(self, step: int) -> None:
        """The step is made of what was seen."""
        flat = torch.cat(self._parts).float().cpu().numpy() if self._parts else np.empty(0, np.float32)
        found: dict[str, NDArray[Any]] = {
            "samples": np.array(self._tags, np.int64).reshape(-1, 2),
            "lengths": np.array(self._lengths, np.int64),
            "logprobs": flat,
        }
        kept = {at: one for at, one in self._made.items() if step - KEPT_STEPS < at < step}
        self._made = {**kept, step: found}  # another thread may read
        self.forget()

    def of_step(self, step: int) -> dict[str, NDArray[Any]]:
        """`samples` int64 `[n, 2]`, `lengths` int64 `[n]`, and `logprobs` float32 of the drawn tokens, one sample's
        after the other. Empty where nothing is known of the step, or not any more."""
        return self._made.get(step, {})
