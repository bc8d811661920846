"""What a back end has that computes on one device, packs as it likes, and does one thing after the other.

This module must not know how anything is computed.
"""

from __future__ import annotations

from typing import Any

import torch

from gyre.workloads.learner.backend import Ranks, StateMemory


class BaseBackend:
    """The members of a `gyre.workloads.learner.backend.LearnerBackend` that have a usual answer. A subclass sets
    `ranks`, whatever of these is otherwise, and has the eight methods that compute: `zero`, `backward`, `forward`,
    `update`, `weights`, `load`, `save` and `restore`. Its `save` returns when all is on the disk."""

    ranks: Ranks
    device = torch.device("cpu")
    dtype = "float32"
    pass_tokens: int | None = None
    may_recompute = False
    width_multiple = 1
    prompts_once = False
    weight_bytes = 0
    memory: StateMemory | None = None
    has_weights = True

    def take_first(self) -> None:
        """They are there from the beginning."""

    def recompute(self, *, on: bool) -> None:
        """It may not."""

    def prepare(self) -> None:
        """There is nothing to get ready."""

    def saved(self, *, wait: bool) -> bool:
        return True

    def status(self) -> dict[str, Any]:
        return {}

    def close(self, *, keep: bool) -> None:
        self.ranks.close()

    def unlink(self) -> None:
        """Nothing outlives the process."""
