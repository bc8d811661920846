"""How a step's groups become micro-batches: by their slots, or in the order in which they are scored.

Each assembly returns the next micro-batch as soon as there is one, and records it in the ledger first (*batches are
recorded*).

Invariants:
- *a step's own*: the micro-batches of a step together have `prompts_per_step` groups, each once;
- *complete*: every group in a micro-batch is scored and in the ledger.

This module must not know who trains micro-batches, or when they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gyre.config import RunSpec
from gyre.errors import GyreError
from gyre.rollouts.drawn import as_drawn
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.micro_batcher import BatchSettings, MicroBatcher
from gyre.rollouts.trainer.sample_ledger import RecordedBatch
from gyre.rollouts.trainer.staleness import Action, Verdict
from gyre.workloads.algorithms.advantages import earned_the_same
from gyre.workloads.trainer.groups.group_state import GroupState, tokens_of

NO_GRADIENT = Verdict(Action.DROP, "all of its samples earned the same")
"""The verdict on a group that dynamic sampling (DAPO, arXiv 2503.14476) replaces."""


class StepAssembly(Protocol):
    @property
    def has_news(self) -> bool:
        """Whether groups were scored that `refresh` has not looked at and that could make a micro-batch."""

    def refresh(self) -> list[tuple[int, Verdict]]:
        """Take note of newly scored groups and of a new step. Returns the groups that are too old or useless now."""

    def take(self) -> RecordedBatch | None:
        """The next micro-batch of the step that is being made, recorded; None where there is none yet."""


def is_made(groups: GroupState, step: int) -> bool:
    """Whether all micro-batches of the step are recorded."""
    return any(batch.last for batch in groups.batches.get(step, []))


def check_staleness(shares: Sequence[Sequence[Group]], step: int, *, max_staleness: int) -> None:
    """Raises GyreError where a token of these groups is older than the bound permits. No correct flow does that."""
    oldest = step - 1 - max_staleness
    for group in (group for share in shares for group in share):
        if group.versions is not None and group.versions[0] < oldest:
            raise GyreError(
                f"group {group.id} has tokens of policy version {group.versions[0]}; step {step} with "
                f"max_staleness {max_staleness} permits {oldest} and newer.",
                hint="This is a defect in Gyre's flow.",
            )


class FixedBatches:
    """Micro-batch `i` has the groups in the `i`-th part of the step's slots."""

    def __init__(self, groups: GroupState, run: RunSpec, *, ranks: int, ordered: bool) -> None:
        self._groups = groups
        self._size = run.groups_per_micro_batch
        self._count = groups.per_step // self._size
        self._ranks = ranks
        self._ordered = ordered

    @property
    def has_news(self) -> bool:
        return False  # the graph's flow says what could be taken

    def refresh(self) -> list[tuple[int, Verdict]]:
        return []

    def take(self) -> RecordedBatch | None:
        groups, step = self._groups, self._groups.step + 1
        made = {batch.index for batch in groups.batches.get(step, [])}
        for index in range(self._count):
            if index in made:
                continue
            first = (step - 1) * groups.per_step + index * self._size
            ids = [groups.id_at(slot) for slot in range(first, first + self._size)]
            if all(group_id in groups.scored for group_id in ids):
                last = len(made) + 1 == self._count
                batch = RecordedBatch(step, index, groups.dealt(ids, self._ranks), last)
                groups.record_batch(batch)
                return batch
            if self._ordered:
                return None
        return None


class StreamedBatches:
    """Micro-batches of the groups that are scored first. The groups of a step are those in its slots or, with an
    `arrival` order, those that the order chooses."""

    def __init__(self, groups: GroupState, run: RunSpec, *, ranks: int, arrival: ArrivalOrder | None) -> None:
        self._groups = groups
        self._run = run
        self._ranks = ranks
        self._arrival = arrival
        self._step = 0
        self._seen: set[int] = set()
        """Scored groups that the arrival order or the batcher has."""
        self._slots_left = 0
        """Slots of the step that no group in the batcher or in a micro-batch fills."""

    @property
    def has_news(self) -> bool:
        return any(group_id not in self._seen for group_id in self._eligible(self._groups.scored))

    def _eligible(self, ids: Iterable[int]) -> list[int]:
        """The groups among these that may be in the step that is being made."""
        if self._arrival is not None:
            return list(ids)
        groups = self._groups
        first = groups.step * groups.per_step
        return [one for one in ids if first <= groups.slot_of(one) < first + groups.per_step]

    def refresh(self) -> list[tuple[int, Verdict]]:
        groups, step = self._groups, self._groups.step + 1
        if step != self._step:
            self._begin(step)
        new = self._eligible(group_id for group_id in groups.scored if group_id not in self._seen)
        useless = []
        if self._run.dynamic_sampling:
            useless = [(group_id, NO_GRADIENT) for group_id in new if _earned_the_same(groups[group_id])]
            new = [group_id for group_id in new if not _earned_the_same(groups[group_id])]
        if self._arrival is None:
            self._offer(new)
            return useless
        for group_id in new:
            runs = [sample.versions for sample in as_drawn(groups[group_id]).samples]
            self._arrival.scored(group_id, runs, trainer_version=groups.step)
        self._seen.update(new)
        choice = self._arrival.choose(trainer_version=groups.step, slots=self._slots_left)
        self._offer(choice.train)
        self._seen.difference_update(group_id for group_id, _ in choice.drop)
        return [*useless, *choice.drop]

    def take(self) -> RecordedBatch | None:
        groups, step = self._groups, self._groups.step + 1
        if step != self._step:
            return None
        batch = self._batcher.take()
        if batch is None:
            return None
        recorded = RecordedBatch(
            step,
            len(groups.batches.get(step, [])),
            groups.dealt(batch.groups, self._ranks),
            batch.completes_mini_batch,
        )
        groups.record_batch(recorded)
        self._seen.difference_update(batch.groups)
        return recorded

    def _begin(self, step: int) -> None:
        """Begin a new step, or after a restart go on with one that is partly recorded."""
        run, groups = self._run, self._groups
        self._step = step
        self._slots_left = groups.per_step - len(groups.ids_of(step))
        if self._arrival is None:
            self._seen.clear()
        self._batcher = MicroBatcher(
            BatchSettings(
                min_samples=run.min_samples_per_micro_batch,
                min_tokens=run.min_tokens_per_micro_batch,
                max_samples=run.max_samples_per_micro_batch,
                max_tokens=run.max_tokens_per_micro_batch,
                min_groups=min(self._ranks, run.groups_per_micro_batch),
                max_groups=run.groups_per_micro_batch,
                mini_batch_groups=max(1, self._slots_left),
            )
        )

    def _offer(self, ids: Sequence[int]) -> None:
        for group_id in ids:
            group = self._groups[group_id]
            self._batcher.add(group_id, samples=len(group.samples), tokens=tokens_of(group))
        self._seen.update(ids)
        self._slots_left -= len(ids)


def _earned_the_same(group: Group) -> bool:
    return earned_the_same([sample.reward or 0.0 for sample in group.samples])
