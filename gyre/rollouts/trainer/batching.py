"""Micro-batches from finished samples, as soon as there are enough of them.

What leaves together is a unit: a whole group where the algorithm compares the group's samples (GRPO), one sample
where it does not. Groups that come whole are added as they are (`add_whole`). The oldest unit that is ready is always
in the next micro-batch; the rest of the token budget is filled with the largest units that fit (first-fit decreasing,
D. S. Johnson 1973), so that none waits for ever and batches are dense.

Invariants:
- *exactly once*: a sample that was added leaves once, however often it is added before its mini-batch is `trained`;
- *whole*: a unit is never split, and has its samples in the order of their ids, so that what is computed over a
  group is bit by bit the same whichever of them finished first;
- *within bounds*: a micro-batch is above the lower bounds and not above the upper ones. Smaller only where a ready
  unit would have gone over an upper bound, where it completes its mini-batch, or on `flush`; larger only where it
  is a single unit;
- *at once*: after `take()` has returned None, what is ready is below a lower bound;
- *boundary*: no micro-batch has units of two mini-batches. A mini-batch has the units that were ready first.

This module must not know what is in a sample but its length, nor when it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BatchSettings:
    min_samples: int = 1
    min_tokens: int = 0
    max_samples: int | None = None
    max_tokens: int | None = None
    """Of prompts and answers together, if that is how samples are added."""
    min_units: int = 0
    max_units: int | None = None
    group_size: int | None = None
    """Samples of a group that leave together; None where each may leave by itself."""
    mini_batch_units: int | None = None
    """Groups in a mini-batch, or samples where there is no `group_size`. None: there is no boundary."""

    def __post_init__(self) -> None:
        for name in ("min_samples", "min_tokens", "min_units"):
            least, most = getattr(self, name), getattr(self, name.replace("min", "max"))
            if least < 0 or (most is not None and (most < 1 or most < least)):
                raise ValueError(
                    f"{name} is {least} and its upper bound {most}; the lower is within 0 and the upper"
                )
        for name in ("group_size", "mini_batch_units"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} is {given}; it is at least 1")


class Counts(NamedTuple):
    samples: int
    tokens: int
    units: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    mini_batch: int
    """Which one it belongs to, counted from 0."""
    units: tuple[int, ...]
    """Groups; samples where each leaves by itself."""
    samples: tuple[int, ...]
    """None of groups that were added whole."""
    counts: Counts
    completes_mini_batch: bool
    """After it the optimizer steps."""


@dataclass(slots=True)
class _Unit:
    name: int
    samples: list[int] = field(default_factory=list)
    count: int = 0
    tokens: int = 0


class MicroBatcher:
    """Incremental: `add` what finished, `take` until there is None."""

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self.mini_batch = 0
        """The one that is being filled."""
        self._units_taken = 0
        """Of it."""
        self._open: dict[int, _Unit] = {}
        self._sizes: dict[int, int] = {}
        self._ready: dict[int, _Unit] = {}
        """By when they became ready."""
        self._became_ready = 0
        self._samples = self._tokens = 0
        """In `_ready`."""
        self._known: set[int] = set()
        self._left: dict[int, list[int]] = {}

    def add(self, sample: int, *, group: int, tokens: int) -> bool:
        """A sample is finished (and scored, if need be). False if it is here already, or has left."""
        if sample in self._known:
            return False
        self._known.add(sample)
        if self.settings.group_size is None:
            self._make_ready(_Unit(sample, [sample], 1, tokens))
            return True
        unit = self._open.setdefault(group, _Unit(group))
        unit.samples.append(sample)
        unit.count += 1
        unit.tokens += tokens
        self._close(group)
        return True

    def add_whole(self, group: int, *, samples: int, tokens: int) -> None:
        """A group all of whose samples are finished; the caller sees to it that it comes once."""
        self._make_ready(_Unit(group, [], samples, tokens))

    def expect(self, group: int, samples: int) -> None:
        """The group has so many samples, not `group_size`: one was set aside, say. 0 gives up what came of it.

        Raises ValueError where more have come already.
        """
        if self.settings.group_size is None:
            return
        came = len(self._open[group].samples) if group in self._open else 0
        if samples and came > samples:
            raise ValueError(f"group {group} has {came} finished samples; it cannot be one of {samples}")
        if not samples:
            self._sizes.pop(group, None)
            self._open.pop(group, None)
            return
        self._sizes[group] = samples
        self._close(group)

    @property
    def ready(self) -> Counts:
        """What could leave."""
        return Counts(self._samples, self._tokens, len(self._ready))

    @property
    def waiting_samples(self) -> int:
        """Finished samples whose group is not whole."""
        return sum(len(unit.samples) for unit in self._open.values())

    def take(self) -> MicroBatch | None:
        """The next micro-batch, if there is one already."""
        return self._take(least=True)

    def flush(self) -> list[MicroBatch]:
        """Everything that is ready, lower bounds or not. Groups that are not whole stay."""
        found = []
        while (batch := self._take(least=False)) is not None:
            found.append(batch)
        return found

    def trained(self, mini_batch: int) -> None:
        """Forget which samples left up to this mini-batch: the ledger sees to it that none comes again."""
        for index in [index for index in self._left if index <= mini_batch]:
            self._known.difference_update(self._left.pop(index))

    # -- filling ------------------------------------------------------------------------------------

    def _close(self, group: int) -> None:
        unit = self._open.get(group)
        if unit is not None and len(unit.samples) >= self._sizes.get(group, self.settings.group_size or 1):
            del self._open[group]
            self._sizes.pop(group, None)
            unit.samples.sort()
            self._make_ready(unit)

    def _make_ready(self, unit: _Unit) -> None:
        self._ready[self._became_ready] = unit
        self._became_ready += 1
        self._samples += unit.count
        self._tokens += unit.tokens

    # -- emptying -----------------------------------------------------------------------------------

    def _take(self, *, least: bool) -> MicroBatch | None:
        if not self._ready:
            return None
        size = self.settings.mini_batch_units
        room = len(self._ready) if size is None else size - self._units_taken
        fills = size is not None and len(self._ready) >= room
        # All that is ready fits into one, and is not enough.
        if least and not fills and self._fits(self.ready) and not self._suffices(self.ready):
            return None
        candidates = list(islice(self._ready, room))
        chosen, counts, is_full = self._pack(candidates)
        completes = fills and len(chosen) == len(candidates)
        if least and not (completes or is_full or self._suffices(counts)):
            return None
        return self._leave(chosen, counts, completes)

    def _pack(self, candidates: Sequence[int]) -> tuple[list[int], Counts, bool]:
        """The oldest, and the largest that fit beside it. And whether any did not."""
        oldest, *others = candidates
        unit = self._ready[oldest]
        chosen, counts = [oldest], Counts(unit.count, unit.tokens, 1)
        is_full = False
        for index in sorted(others, key=lambda index: -self._ready[index].tokens):
            unit = self._ready[index]
            more = Counts(counts.samples + unit.count, counts.tokens + unit.tokens, counts.units + 1)
            if self._fits(more):
                chosen.append(index)
                counts = more
            else:
                is_full = True
        return chosen, counts, is_full

    def _fits(self, counts: Counts) -> bool:
        limits = self.settings
        return (
            (limits.max_samples is None or counts.samples <= limits.max_samples)
            and (limits.max_tokens is None or counts.tokens <= limits.max_tokens)
            and (limits.max_units is None or counts.units <= limits.max_units)
        )

    def _suffices(self, counts: Counts) -> bool:
        limits = self.settings
        return (
            counts.samples >= limits.min_samples
            and counts.tokens >= limits.min_tokens
            and counts.units >= limits.min_units
        )

    def _leave(self, chosen: list[int], counts: Counts, completes: bool) -> MicroBatch:
        units = [self._ready.pop(index) for index in chosen]
        samples = [sample for unit in units for sample in unit.samples]
        self._samples -= counts.samples
        self._tokens -= counts.tokens
        self._left.setdefault(self.mini_batch, []).extend(samples)
        names = tuple(unit.name for unit in units)
        batch = MicroBatch(self.mini_batch, names, tuple(samples), counts, completes)
        self._units_taken += len(chosen)
        if completes:
            self.mini_batch += 1
            self._units_taken = 0
        return batch


def deal(tokens: Mapping[int, int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Units of so many tokens to ranks, so that none has much more to do than the others: the longest first, each to
    the rank with the fewest tokens (R. L. Graham 1969). The same units are always dealt the same way."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(tokens, key=lambda unit: (-tokens[unit], unit)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank])))
        shares[rank].append(unit)
        loads[rank] += tokens[unit]
    return tuple(tuple(sorted(share)) for share in shares)


class LossMean(Enum):
    """What a mini-batch's loss is the mean of."""

    SAMPLE = "sample"
    """Of the samples' losses, each of which may itself be a mean over tokens (GRPO)."""
    TOKEN = "token"
    """Of all tokens' losses (DAPO, arXiv 2503.14476)."""


def loss_scale(part: Counts, total: Counts, mean: LossMean) -> float:
    """What a micro-batch's mean loss is multiplied with, so that the sum of all is the mean of the mini-batch.

    `part` counts the micro-batch, on all data-parallel ranks or on one, and `total` the mini-batch on the same.
    """
    whole, share = (total.samples, part.samples) if mean is LossMean.SAMPLE else (total.tokens, part.tokens)
    if not 0 <= share <= whole or not whole:
        raise ValueError(f"a micro-batch of {share} {mean.value}s in a mini-batch of {whole}")
    return share / whole


def late_scale(assumed: Counts, total: Counts, mean: LossMean) -> float:
    """What the summed gradient is multiplied with before the optimizer steps, if the total was not known yet.

    While samples stream, nobody knows how many tokens the mini-batch will have. Scale each micro-batch by an assumed
    total, and the sum by this once the last one has come; nothing is lost but a rounding.
    """
    if mean is LossMean.SAMPLE:
        return assumed.samples / total.samples
    return assumed.tokens / total.tokens
