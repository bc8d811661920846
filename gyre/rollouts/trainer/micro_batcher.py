"""Micro-batches from finished groups, as soon as there are enough of them.

The oldest group that is ready is always in the next micro-batch; the rest of the token budget is filled with the
largest groups that fit (first-fit decreasing, D. S. Johnson 1973), so that none waits for ever and batches are dense.

Invariants:
- *exactly once*: a group that was added leaves once;
- *within bounds*: a micro-batch is above the lower bounds and not above the upper ones. It is smaller only where
  another ready group would have gone over an upper bound, or where it completes its mini-batch; it is larger only
  where it is a single group;
- *at once*: after `take()` has returned None, what is ready is below a lower bound;
- *boundary*: no micro-batch has groups of two mini-batches. A mini-batch has the groups that were ready first.

This module must not know what is in a group but its size, nor when it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Bounds of a micro-batch in samples, tokens and groups."""

    min_samples: int = 1
    min_tokens: int = 0
    max_samples: int | None = None
    max_tokens: int | None = None
    """Counts what groups are added with: prompts and answers together, for the trainer."""
    min_groups: int = 0
    max_groups: int | None = None
    mini_batch_groups: int | None = None
    """Groups in a mini-batch. None: there is no boundary."""

    def __post_init__(self) -> None:
        for name in ("min_samples", "min_tokens", "min_groups"):
            least, most = getattr(self, name), getattr(self, name.replace("min", "max"))
            if least < 0 or (most is not None and (most < 1 or most < least)):
                raise ValueError(
                    f"{name} is {least} and its upper bound {most}; the lower is within 0 and the upper"
                )
        if self.mini_batch_groups is not None and self.mini_batch_groups < 1:
            raise ValueError(f"mini_batch_groups is {self.mini_batch_groups}; it is at least 1")


class Counts(NamedTuple):
    samples: int
    tokens: int
    groups: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    groups: tuple[int, ...]
    counts: Counts
    completes_mini_batch: bool
    """After it the optimizer steps."""


class _Ready(NamedTuple):
    group: int
    samples: int
    tokens: int


class MicroBatcher:
    """Incremental: `add` what finished, `take` until there is None."""

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self._groups_taken = 0
        """Of the mini-batch that is being filled."""
        self._ready: dict[int, _Ready] = {}
        """By when they became ready."""
        self._became_ready = 0
        self._samples = self._tokens = 0
        """In `_ready`."""

    def add(self, group: int, *, samples: int, tokens: int) -> None:
        """Add a group all of whose samples are finished. The caller sees to it that it comes once."""
        self._ready[self._became_ready] = _Ready(group, samples, tokens)
        self._became_ready += 1
        self._samples += samples
        self._tokens += tokens

    @property
    def ready(self) -> Counts:
        """What could leave."""
        return Counts(self._samples, self._tokens, len(self._ready))

    def take(self) -> MicroBatch | None:
        """The next micro-batch, if there is one already."""
        if not self._ready:
            return None
        size = self.settings.mini_batch_groups
        room = len(self._ready) if size is None else size - self._groups_taken
        fills = size is not None and len(self._ready) >= room
        # All that is ready fits into one, and is not enough.
        if not fills and self._fits(self.ready) and not self._suffices(self.ready):
            return None
        candidates = list(islice(self._ready, room))
        chosen, counts, is_full = self._pack(candidates)
        completes = fills and len(chosen) == len(candidates)
        if not (completes or is_full or self._suffices(counts)):
            return None
        groups = tuple(self._ready.pop(index).group for index in chosen)
        self._samples -= counts.samples
        self._tokens -= counts.tokens
        self._groups_taken = 0 if completes else self._groups_taken + len(chosen)
        return MicroBatch(groups, counts, completes)

    def _pack(self, candidates: Sequence[int]) -> tuple[list[int], Counts, bool]:
        """The oldest, and the largest that fit beside it. And whether any did not."""
        oldest, *others = candidates
        first = self._ready[oldest]
        chosen, counts = [oldest], Counts(first.samples, first.tokens, 1)
        is_full = False
        for index in sorted(others, key=lambda index: -self._ready[index].tokens):
            one = self._ready[index]
            more = Counts(counts.samples + one.samples, counts.tokens + one.tokens, counts.groups + 1)
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
            and (limits.max_groups is None or counts.groups <= limits.max_groups)
        )

    def _suffices(self, counts: Counts) -> bool:
        limits = self.settings
        return (
            counts.samples >= limits.min_samples
            and counts.tokens >= limits.min_tokens
            and counts.groups >= limits.min_groups
        )


def deal(tokens: Mapping[int, int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal groups, given by their tokens, to ranks so that none has much more to do than the others: the longest first,
    each to the rank with the fewest tokens (R. L. Graham 1969). The same groups are always dealt the same way."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(tokens, key=lambda group: (-tokens[group], group)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank])))
        shares[rank].append(group)
        loads[rank] += tokens[group]
    return tuple(tuple(sorted(share)) for share in shares)
