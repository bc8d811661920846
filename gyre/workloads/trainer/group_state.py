"""What the trainer knows of its groups, steps and checkpoints: the sample ledger, in memory.

Invariant *ledger first*: what is written here was in the ledger before, so a trainer that dies anywhere is continued
by one that reads the ledger.

This module must not know of vertices, calls or the graph.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.batching import deal
from gyre.rollouts.trainer.sample_ledger import RecordedBatch, Restore, SampleLedger
from gyre.workloads.trainer.slots import Slots

RETOLD_STEPS = 1000
"""More than a trainer makes while no master listens, before it ends itself for want of one."""


class GroupState:
    """`groups` are those that were drawn and that no checkpoint covers, with samples as far as they came."""

    def __init__(self, ledger: SampleLedger, *, per_step: int) -> None:
        self._ledger = ledger
        self.per_step = per_step
        found = ledger.open()
        self.step = found.step
        """The last optimizer step in the ledger; 0 before the first."""
        self.cursor = found.cursor
        """The next prompt to draw."""
        self.digests = found.digests
        self.groups: dict[int, Group] = found.groups
        self.queued = set(found.queued)
        """Groups that were drawn and are not whole."""
        self.asked_of = {
            group_id: version for group_id, version in found.queued.items() if version is not None
        }
        """The oldest policy that a queued group may be of, where that was written."""
        self.batches = found.batches
        """The micro-batches of steps that no checkpoint covers, and of the one that is being made."""
        recorded = {group_id for batches in self.batches.values() for one in batches for group_id in one.ids}
        self.whole = {g: None for g in found.groups if g not in recorded and g not in found.trained}
        """Groups that are in the ledger with their samples and in no micro-batch, in the order in which they came."""
        self.checkpoint_step = found.checkpoint_step
        self.checkpoint_path = found.checkpoint_path
        self.tokens = sum(int(row.get("tokens", 0)) for row in found.metrics.values())
        self.last_metrics = dict(list(found.metrics.items())[-RETOLD_STEPS:])
        """What was told, or was to be told, of the last steps of earlier trainers."""
        self._places = Slots(found.replaced)
        self.set_aside_count = len(found.replaced)
        self.restores = found.restores
        """The last restore of each role that had one."""
        self._restore_count = found.restore_count
        self._add_steps_without_record(found.trained, list(found.metrics))

    def _add_steps_without_record(self, trained: frozenset[int], steps: Sequence[int]) -> None:
        """A ledger from before micro-batches were recorded: a step is its groups by number."""
        for step in steps:
            ids = range((step - 1) * self.per_step, step * self.per_step)
            if step not in self.batches and trained.issuperset(ids):
                self.batches[step] = [RecordedBatch(step, 0, (tuple(ids),), last=True)]

    # -- places and steps ---------------------------------------------------------------------------

    def id_at(self, place: int) -> int:
        return self._places.id_at(place)

    def place_of(self, group_id: int) -> int:
        return self._places.place_of(group_id)

    def is_drawn(self, place: int) -> bool:
        return self.id_at(place) < self.cursor

    def is_settled(self, group_id: int) -> bool:
        """Whether the ledger has all that will ever be known of its samples: nobody need generate it."""
        return group_id < self.cursor and group_id not in self.queued

    def ids_of(self, step: int) -> list[int]:
        """The groups of a step, as far as it is made."""
        return sorted(group_id for batch in self.batches.get(step, []) for group_id in batch.ids)

    def shares(self, batch: RecordedBatch, ranks: int) -> list[list[Group]]:
        """The groups of a micro-batch by rank: as recorded, or dealt anew where it was for other ranks."""
        shares = batch.shares if len(batch.shares) == ranks else self.dealt(batch.ids, ranks)
        return [[self.groups[group_id] for group_id in share] for share in shares]

    def dealt(self, ids: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
        return deal({group_id: tokens_of(self.groups[group_id]) for group_id in ids}, ranks)

    # -- what happens to groups ---------------------------------------------------------------------

    def drawn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.groups[group.id] = group
        new = [group.id for group in groups if group.id >= self.cursor]
        if new:
            self.cursor = new[-1] + 1
            self._ledger.drawn(new, self.cursor)
            self.queued.update(new)

    def asked(self, ids: Sequence[int], version: int) -> None:
        """They are asked of this policy and newer ones."""
        self._ledger.asked(ids, version)
        self.asked_of.update(dict.fromkeys(ids, version))

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
        if not ids:
            return
        self._ledger.done([self.groups[group_id] for group_id in ids])
        self.queued.difference_update(ids)
        self.whole.update(dict.fromkeys(ids))
        for group_id in ids:
            self.asked_of.pop(group_id, None)

    def record(self, batch: RecordedBatch) -> None:
        self._ledger.recorded(batch)
        self.batches.setdefault(batch.step, []).append(batch)
        for group_id in batch.ids:
            del self.whole[group_id]

    def give_back(self, group_id: int, *, reason: str, evidence: str) -> int:
        """Its samples are not wanted, its prompt is queued again, for the newest policy. How many tokens that cost."""
        tokens = self.groups[group_id].token_count
        self._ledger.given_back(
            group_id, version=self.step, reason=reason, tokens=tokens, evidence=evidence, now=time.time()
        )
        self.asked_of[group_id] = self.step
        del self.whole[group_id]
        self.queued.add(group_id)
        self.groups[group_id] = replace(self.groups[group_id], samples=[])
        return tokens

    def set_aside(self, group_id: int, by: Group, *, reason: str, evidence: str) -> int:
        """It is given up for good; `by`, of the id that `cursor` names, takes its place. How many tokens that cost."""
        tokens = self.groups[group_id].token_count
        self._ledger.set_aside(
            group_id,
            replaced_by=by.id,
            cursor=by.id + 1,
            reason=reason,
            tokens=tokens,
            evidence=evidence,
            now=time.time(),
        )
        self.cursor = by.id + 1
        self._places.replace(group_id, by.id)
        self.set_aside_count += 1
        self.whole.pop(group_id, None)
        self.queued.discard(group_id)
        self.asked_of.pop(group_id, None)
        self.queued.add(by.id)
        del self.groups[group_id]
        self.groups[by.id] = by
        return tokens

    # -- what happens to steps ----------------------------------------------------------------------

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

    def forget_digests(self, step: int) -> None:
        """From `step` on weights are others than those that were recorded."""
        self._ledger.digests_forgotten(step)
        self.digests = {at: digest for at, digest in self.digests.items() if at < step}

    def trained_by(self, step: int) -> list[list[int]]:
        """The ids that steps up to `step` trained, as `[start, end)`; those that were set aside count as trained, for
        nobody will train them. `step` is covered by no older checkpoint than the last."""
        left = {*self.queued, *self.whole}
        left.update(group_id for later in self.batches if later > step for group_id in self.ids_of(later))
        intervals: list[list[int]] = []
        start = 0
        for end in [*sorted(left), self.cursor]:
            if start < end:
                intervals.append([start, end])
            start = end + 1
        return intervals

    def restoring(self, role: str, gang: int, source: str, checkpoint_step: int) -> Restore:
        """The ranks' state is about to come from `source`. In place of the role's last one, where that came to
        nothing."""
        last = self.restores.get(role)
        if last is not None and last.step is None:
            number = last.number
        else:
            number = self._restore_count = self._restore_count + 1
        return self._write_restore(Restore(number, role, gang, source, checkpoint_step))

    def restored(self, restore: Restore, step: int, seconds: float | None) -> Restore:
        """It is there, of `step`. `seconds` is how long it took, None where nobody knows."""
        return self._write_restore(replace(restore, step=step, seconds=seconds))

    def _write_restore(self, restore: Restore) -> Restore:
        self._ledger.restore(restore)
        self.restores[restore.role] = restore
        return restore

    def checkpointed(self, step: int, path: Path) -> None:
        """A complete checkpoint is on disk; what it covers is forgotten."""
        self._ledger.checkpoint(step=step, path=path, now=time.time())
        self.checkpoint_step, self.checkpoint_path = step, path
        for covered in [at for at in self.batches if at <= step]:
            for batch in self.batches.pop(covered):
                for group_id in batch.ids:
                    del self.groups[group_id]


def tokens_of(group: Group) -> int:
    """What a group costs to train: prompts and answers of all samples."""
    return len(group.prompt_ids) * len(group.samples) + group.token_count
