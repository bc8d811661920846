"""The samples that wait for an instance, in the order in which they are to be given out.

Samples wait in lines, one for each oldest policy version that samples accept, so that those which no instance may have
yet stand in nobody's way. Beside the order of a line, a group's queued samples can be asked for by where the group's
prompt is: at a certain instance, or at none yet.

Invariants:
- *voided, not searched*: a sample that leaves the queue leaves its heap entries behind. They are skipped when they
  come up, and swept out when they outnumber the others;
- *empty groups go*: a group is forgotten when no sample of it is queued or at an instance.

This module must not know how an instance is chosen.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample, QueueKey

_SWEEP_SLACK = 64
"""Void entries that are tolerated beside as many void as valid ones, so that small heaps are not swept all the time."""

_Entry = tuple[QueueKey, PlacedSample]


@dataclass(slots=True, eq=False)
class QueuedGroup:
    prompt_at: dict[Instance, int] = field(default_factory=dict)
    """Instances that have the group's prompt, and how many of its samples each has."""
    queued: int = 0
    min_version: int = -1
    """The line that its samples wait in."""
    heap: list[_Entry] = field(default_factory=list)
    passed: int = 0
    """How often a sample of it was first in the queue and another one was given out."""

    def is_wanted(self, at: Instance | None) -> bool:
        """Whether it has queued samples, and its prompt at this instance; at none for None."""
        return self.queued > 0 and (at in self.prompt_at if at is not None else not self.prompt_at)


@dataclass(slots=True, eq=False)
class _Line:
    """Samples that accept the same policies."""

    heap: list[_Entry] = field(default_factory=list)
    new_groups: list[int] = field(default_factory=list)
    """Heap of groups that have queued samples and their prompt nowhere. Entries of other groups are void."""
    length: int = 0


class SampleQueue:
    def __init__(self) -> None:
        self.groups: dict[int, QueuedGroup] = {}
        self.typical_tokens = 0.0
        """What was lately expected of a sample when it was queued."""
        self._lines: dict[int, _Line] = {}
        """By the oldest version that their samples accept; none is empty."""
        self._length = 0
        self._tokens = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> float:
        """Predicted tokens of all queued samples."""
        return max(self._tokens, 0.0)

    # -- samples come and go ------------------------------------------------------------------------

    def add(self, sample: PlacedSample) -> None:
        """Queue a sample whose `expected` tokens are predicted."""
        self._arrivals += 1
        key = sample.queue_key = QueueKey(
            not sample.done_tokens, sample.order or (sample.group, 0), self._arrivals
        )
        group = self.groups.setdefault(sample.group, QueuedGroup())
        group.min_version = sample.min_version
        group.queued += 1
        line = self._lines.setdefault(sample.min_version, _Line())
        line.length += 1
        heapq.heappush(group.heap, (key, sample))
        heapq.heappush(line.heap, (key, sample))
        self._length += 1
        self._tokens += sample.expected
        self.typical_tokens += (sample.expected - self.typical_tokens) * (
            0.02 if self.typical_tokens else 1.0
        )
        if group.queued == 1:
            for instance in group.prompt_at:
                self._want(instance.wanted_groups, sample.group, instance)
            if not group.prompt_at:
                self._want(line.new_groups, sample.group, None)

    def take(self, sample: PlacedSample) -> None:
        """The sample is about to be placed: `prompt_arrived` comes next."""
        sample.queue_key = None
        self.groups[sample.group].queued -= 1
        self._length -= 1
        self._tokens -= sample.expected
        line = self._lines[sample.min_version]
        line.length -= 1
        if not line.length:
            del self._lines[sample.min_version]
        if not self._length:
            self._tokens = 0.0

    def withdraw(self, sample: PlacedSample) -> None:
        """Remove the sample from the queue: it is not to be given out."""
        self.take(sample)
        line = self._lines.get(sample.min_version)
        if line is not None and len(line.heap) > 2 * line.length + _SWEEP_SLACK:
            line.heap = [entry for entry in line.heap if entry[1].queue_key is entry[0]]
            heapq.heapify(line.heap)
        self._forget_if_empty(sample.group)

    # -- where prompts are --------------------------------------------------------------------------

    def prompt_arrived(self, number: int, instance: Instance) -> bool:
        """One more sample of the group is at the instance; whether it is the first."""
        group = self.groups.setdefault(number, QueuedGroup())
        count = group.prompt_at.get(instance, 0)
        group.prompt_at[instance] = count + 1
        if count:
            return False
        group.passed = 0
        if group.queued:
            self._want(instance.wanted_groups, number, instance)
        return True

    def prompt_left(self, number: int, instance: Instance) -> bool:
        """One sample of the group less is at the instance; whether it was the last."""
        group = self.groups[number]
        group.prompt_at[instance] -= 1
        if group.prompt_at[instance]:
            return False
        del group.prompt_at[instance]
        if group.queued and not group.prompt_at:
            self._want(self._lines[group.min_version].new_groups, number, None)
        self._forget_if_empty(number)
        return True

    def _forget_if_empty(self, number: int) -> None:
        group = self.groups[number]
        if not group.queued and not group.prompt_at:
            del self.groups[number]

    # -- who is next --------------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """The oldest version that the samples of each line accept."""
        return list(self._lines)

    def first(self, min_version: int) -> PlacedSample | None:
        """Of the line of samples that accept this version, and none before it."""
        line = self._lines.get(min_version)
        return _first(line.heap) if line is not None else None

    def first_with_prompt_at(self, instance: Instance) -> PlacedSample | None:
        """The first of the oldest group that has its prompt at the instance."""
        return self._first_wanted(instance.wanted_groups, instance)

    def first_of_new_group(self, min_version: int) -> PlacedSample | None:
        """The first of the oldest group in this line that has its prompt nowhere."""
        line = self._lines.get(min_version)
        return self._first_wanted(line.new_groups, None) if line is not None else None

    def _first_wanted(self, numbers: list[int], at: Instance | None) -> PlacedSample | None:
        while numbers:
            group = self.groups.get(numbers[0])
            if group is not None and group.is_wanted(at):
                return _first(group.heap)
            heapq.heappop(numbers)
        return None

    def _want(self, numbers: list[int], number: int, at: Instance | None) -> None:
        heapq.heappush(numbers, number)
        most = at.slots if at is not None else len(self.groups)
        if len(numbers) > 2 * most + _SWEEP_SLACK:
            known = ((other, self.groups.get(other)) for other in set(numbers))
            numbers[:] = [other for other, group in known if group is not None and group.is_wanted(at)]
            heapq.heapify(numbers)


def _first(heap: list[_Entry]) -> PlacedSample | None:
    while heap:
        key, sample = heap[0]
        if sample.queue_key is key:
            return sample
        heapq.heappop(heap)
    return None
