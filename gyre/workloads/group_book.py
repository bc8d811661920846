"""What the trainer knows of its groups, steps and checkpoints: the sample ledger, in memory.

Invariant *ledger first*: what is written here was in the ledger before, so a trainer that dies anywhere is continued
by one that reads the ledger.

This module must not know of vertices, calls or the graph.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre.rollouts.ledger import SampleLedger
from gyre.rollouts.samples import Group


class GroupBook:
    """`groups` are those that were drawn and that no checkpoint covers, with samples as far as they came."""

    def __init__(self, ledger: SampleLedger, *, per_step: int, micro_batches: int) -> None:
        self._ledger = ledger
        self.per_step = per_step
        self.micro_batches = micro_batches
        found = ledger.open()
        self.step = found.step
        """The last optimizer step in the ledger; 0 before the first."""
        self.cursor = found.cursor
        """The next prompt to draw."""
        self.digests = found.digests
        self.groups: dict[int, Group] = found.groups
        self.checkpoint_step = found.checkpoint_step
        self.checkpoint_path = found.checkpoint_path
        self.tokens = sum(int(row.get("tokens", 0)) for row in found.metrics.values())

    def ids_of(self, step: int) -> list[int]:
        """The groups of a step."""
        return list(range((step - 1) * self.per_step, step * self.per_step))

    def micro_batches_of(self, step: int) -> list[list[int]]:
        ids = self.ids_of(step)
        size = self.per_step // self.micro_batches
        return [ids[index * size : (index + 1) * size] for index in range(self.micro_batches)]

    def drawn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.groups[group.id] = group
        new = [group.id for group in groups if group.id >= self.cursor]
        if new:
            self.cursor = groups[-1].id + 1
            self._ledger.drawn(new, self.cursor)

    def merge(self, returned: Sequence[Group]) -> None:
        """What operators add to a group comes together here, whichever of them ends first."""
        for new in returned:
            mine = self.groups[new.id]
            if not mine.samples:
                mine.samples = new.samples
                continue
            for sample, update in zip(mine.samples, new.samples, strict=True):
                sample.reward = update.reward if update.reward is not None else sample.reward
                sample.extras |= update.extras

    def done(self, ids: Sequence[int]) -> None:
        """Their samples are whole and scored."""
        self._ledger.done([self.groups[group_id] for group_id in ids])

    def trained(self, step: int, digest: str, metrics: dict[str, Any]) -> None:
        self._ledger.trained(
            step=step,
            version=step,
            digest=digest,
            group_ids=self.ids_of(step),
            metrics=metrics,
            now=time.time(),
        )
        self.step = step
        self.digests[step] = digest
        self.tokens += metrics["tokens"]

    def checkpointed(self, step: int, path: Path) -> None:
        """A complete checkpoint is on disk; what it covers is forgotten."""
        self._ledger.checkpoint(step=step, path=path, now=time.time())
        self.checkpoint_step, self.checkpoint_path = step, path
        for group_id in [group_id for group_id in self.groups if group_id < step * self.per_step]:
            del self.groups[group_id]
