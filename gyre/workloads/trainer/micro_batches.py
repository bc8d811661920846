"""How a step's groups become micro-batches: by their numbers, or as they come.

Either gives the next micro-batch when there is one, and has it recorded in the ledger first (*batches are recorded*).

Invariants:
- *a step's own*: all micro-batches of a step together have `prompts_per_step` groups, each once;
- *whole*: a micro-batch has groups that are whole and in the ledger.

This module must not know who trains micro-batches, or when they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gyre.config import RunSpec
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.batching import BatchSettings, MicroBatcher
from gyre.rollouts.trainer.sample_ledger import RecordedBatch
from gyre.rollouts.trainer.staleness import Action, Verdict
from gyre.workloads.trainer.group_state import GroupState, tokens_of

NO_GRADIENT = Verdict(Action.DROP, "all of its samples earned the same")
"""Of a group that dynamic sampling (DAPO, arXiv 2503.14476) replaces."""


class StepAssembly(Protocol):
    @property
    def has_news(self) -> bool:
        """Whether groups became whole that `refresh` has not looked at, and that could make a micro-batch."""

    def refresh(self) -> list[tuple[int, Verdict]]:
        """Look at the book: groups became whole, or a step ended. The groups that are too old now, or of no use."""

    def take(self) -> RecordedBatch | None:
        """The next micro-batch of the step after the book's last, recorded; None where there is none yet."""


def is_made(book: GroupState, step: int) -> bool:
    """Whether all micro-batches of the step are recorded."""
    return any(batch.last for batch in book.batches.get(step, []))


class FixedBatches:
    """Micro-batch `i` has the groups in the `i`-th part of the step's places."""

    def __init__(self, book: GroupState, run: RunSpec, *, ranks: int, ordered: bool) -> None:
        self._book = book
        self._size = run.groups_per_micro_batch
        self._count = book.per_step // self._size
        self._ranks = ranks
        self._ordered = ordered

    @property
    def has_news(self) -> bool:
        return False  # what could be taken follows from the graph

    def refresh(self) -> list[tuple[int, Verdict]]:
        return []

    def take(self) -> RecordedBatch | None:
        book, step = self._book, self._book.step + 1
        made = {batch.index for batch in book.batches.get(step, [])}
        for index in range(self._count):
            if index in made:
                continue
            first = (step - 1) * book.per_step + index * self._size
            ids = [book.id_at(place) for place in range(first, first + self._size)]
            if all(group_id in book.whole for group_id in ids):
                last = len(made) + 1 == self._count
                batch = RecordedBatch(step, index, book.dealt(ids, self._ranks), last)
                book.record(batch)
                return batch
            if self._ordered:
                return None
        return None


class StreamedBatches:
    """Micro-batches of the groups that are whole first. Which groups are a step's own: those in its places, or, with
    an `arrival` order, those that it chooses."""

    def __init__(self, book: GroupState, run: RunSpec, *, ranks: int, arrival: ArrivalOrder | None) -> None:
        self._book = book
        self._run = run
        self._ranks = ranks
        self._arrival = arrival
        self._step = 0
        self._seen: set[int] = set()
        """Whole groups that the arrival order was told of, or that are in the batcher."""
        self._places_left = 0
        """Of the step, not counting those that the batcher has."""

    @property
    def has_news(self) -> bool:
        return any(group_id not in self._seen for group_id in self._own(self._book.whole))

    def _own(self, ids: Iterable[int]) -> list[int]:
        """Those that may be in the step that is being made."""
        if self._arrival is not None:
            return list(ids)
        first = self._book.step * self._book.per_step
        return [one for one in ids if first <= self._book.place_of(one) < first + self._book.per_step]

    def refresh(self) -> list[tuple[int, Verdict]]:
        book, step = self._book, self._book.step + 1
        if step != self._step:
            self._begin(step)
        new = self._own(group_id for group_id in book.whole if group_id not in self._seen)
        useless = []
        if self._run.dynamic_sampling:
            useless = [(group_id, NO_GRADIENT) for group_id in new if _earned_the_same(book.groups[group_id])]
            new = [group_id for group_id in new if not _earned_the_same(book.groups[group_id])]
        if self._arrival is None:
            self._offer(new)
            return useless
        for group_id in new:
            runs = [sample.versions for sample in book.groups[group_id].samples]
            self._arrival.whole(group_id, runs, trainer_version=book.step)
        self._seen.update(new)
        choice = self._arrival.choose(trainer_version=book.step, places=self._places_left)
        self._offer(choice.train)
        self._seen.difference_update(group_id for group_id, _ in choice.drop)
        return [*useless, *choice.drop]

    def take(self) -> RecordedBatch | None:
        book, step = self._book, self._book.step + 1
        if step != self._step:
            return None
        batch = self._batcher.take()
        if batch is None:
            return None
        recorded = RecordedBatch(
            step,
            len(book.batches.get(step, [])),
            book.dealt(batch.units, self._ranks),
            batch.completes_mini_batch,
        )
        book.record(recorded)
        self._seen.difference_update(batch.units)
        return recorded

    def _begin(self, step: int) -> None:
        """A new step; or, after a restart, one of which some is recorded already."""
        run, book = self._run, self._book
        self._step = step
        self._places_left = book.per_step - len(book.ids_of(step))
        if self._arrival is None:
            self._seen.clear()
        self._batcher = MicroBatcher(
            BatchSettings(
                min_samples=run.min_samples_per_micro_batch,
                min_tokens=run.min_tokens_per_micro_batch,
                max_samples=run.max_samples_per_micro_batch,
                max_tokens=run.max_tokens_per_micro_batch,
                min_units=min(self._ranks, run.groups_per_micro_batch),
                max_units=run.groups_per_micro_batch,
                mini_batch_units=max(1, self._places_left),
            )
        )

    def _offer(self, ids: Sequence[int]) -> None:
        for group_id in ids:
            group = self._book.groups[group_id]
            self._batcher.add_whole(group_id, samples=len(group.samples), tokens=tokens_of(group))
        self._seen.update(ids)
        self._places_left -= len(ids)


def _earned_the_same(group: Group) -> bool:
    return len({sample.reward for sample in group.samples}) == 1
