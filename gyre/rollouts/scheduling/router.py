"""Which instance gets which queued sample.

Join the shortest queue, measured in the time that an instance needs to drain what it has and one sample more
(predicted tokens by measured rate), with four amendments:
- a sample stays with an instance that has its group's prompt while the prefill saved is worth more than the imbalance,
  and lets other samples pass for a while when that instance is full;
- imbalance counts only as far as the queue would not even it out by itself;
- where all slots are in use, the wait for one counts;
- an agent's turn goes to the instance that has what its prompt begins with, while that has room and the samples there
  lose less by it than those elsewhere by reading the prefix again. Without that instance (it is gone, drains, has
  another version) there is no prefix.

Invariants:
- *able*: no sample is given to an instance that left, does not accept samples, or has no room;
- *within admission*: an instance is never given more than its slots; beyond its KV memory at most one sample, so that
  no sample is too large to ever run. What it has when it comes back it keeps;
- *its own policies*: a sample goes to no instance whose policy version is older than the sample accepts, and one that
  no instance may have yet keeps no other waiting;
- *work-conserving*: after `assign()` nothing is queued while an accepting instance that may have it has room;
- *oldest group first*: of samples that wait, those of the oldest group go first; of its turns those of the session that
  has had most. A group is trained when its last session has ended, and a session that is nearly done gives its memory
  back soonest;
- *near-linear*: an assignment costs O(log instances).

This module must not know engines, sockets, the ledger or the time.
"""

from __future__ import annotations

import heapq

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample, QueueKey
from gyre.rollouts.scheduling.placement import Placement


class OpenInstances:
    """The instances with room, first the one that would be done first with one sample more."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._heaps: dict[int, list[tuple[float, int, int, Instance]]] = {}
        """By policy version: (drain time with one sample more, number, entry, instance). An instance's earlier entries
        are void."""
        self._one_more = 0.0
        """Tokens that one sample more was expected to get when the entries were made."""
        self.has_news = False
        """Whether an instance has a free slot, or one for other samples than before, or more samples than slots, which
        was not so when this was last set to False."""
        self._free: dict[Instance, int] = {}
        """Those that had a free slot when they were entered, and their policy version then."""
        self._crowded: dict[Instance, None] = {}
        """Those that had more samples than slots then."""

    def refresh(self) -> None:
        """Take into account what changed since the last decision."""
        placement, changed = self._placement, self._placement.load.changed
        typical = placement.queue.typical_tokens
        if not 0.8 * typical <= self._one_more <= 1.25 * typical:
            self._one_more = typical
            changed.update(dict.fromkeys(placement.instances.values()))
        placement.load.predict_again()
        for instance in changed:
            self.enter(instance)
        changed.clear()
        if sum(map(len, self._heaps.values())) > 4 * len(placement.instances) + 64:
            for heap in self._heaps.values():
                heap[:] = [entry for entry in heap if entry[2] == entry[3].heap_entry]
                heapq.heapify(heap)

    def enter(self, instance: Instance) -> None:
        """Enter the instance as it is now; its earlier entry is void."""
        instance.heap_entry += 1
        self._note_slots(instance)
        if instance.has_room:
            done_s = self._placement.load.left_s(instance, more=1, more_tokens=self._one_more)
            done_s += self.slot_s(instance)
            heap = self._heaps.setdefault(instance.version, [])
            heapq.heappush(heap, (done_s, instance.number, instance.heap_entry, instance))

    def _note_slots(self, instance: Instance) -> None:
        if not instance.has_free_slot:
            self._free.pop(instance, None)
        elif self._free.get(instance) != instance.version:
            self._free[instance] = instance.version
            self.has_news = True
        if len(instance.counted) <= instance.max_running:
            self._crowded.pop(instance, None)
        elif instance not in self._crowded:
            self._crowded[instance] = None
            self.has_news = True

    def free_slots(self) -> list[Instance]:
        """The instances that have a free slot. Those that left are forgotten."""
        for one in [one for one in self._free if not one.has_free_slot]:
            del self._free[one]
        return list(self._free)

    def crowded(self) -> list[Instance]:
        """The instances that have more samples than slots. Those that left are forgotten."""
        for one in [one for one in self._crowded if len(one.counted) <= one.max_running]:
            del self._crowded[one]
        return list(self._crowded)

    def slot_s(self, instance: Instance) -> float:
        """How long a sample given to the instance waits for another one's end where all slots are in use, while it
        could run elsewhere."""
        if len(instance.counted) < instance.max_running:
            return 0.0
        return self._one_more * instance.max_running / instance.rate_tokens_s

    def best(self, min_version: int = -1) -> Instance | None:
        """Of those whose policy is not older than `min_version`; None where none has room."""
        best: tuple[float, int, int, Instance] | None = None
        for version, heap in list(self._heaps.items()):
            while heap and heap[0][2] != heap[0][3].heap_entry:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[version]
            elif version >= min_version and (best is None or heap[0] < best):
                best = heap[0]
        return best[3] if best is not None else None


class Router:
    """Decisions over a placement. Each is entered there at once, since the next one builds on it."""

    def __init__(self, placement: Placement, open_instances: OpenInstances | None = None) -> None:
        self._placement = placement
        self._open = open_instances or OpenInstances(placement)

    def assign(self, limit: int | None = None) -> list[tuple[PlacedSample, Instance]]:
        """Give queued samples to instances with room, at most `limit` of them."""
        self._open.refresh()
        queue = self._placement.queue
        given: list[tuple[PlacedSample, Instance]] = []
        lines: list[tuple[QueueKey, int]] = []
        """The first sample's place and the oldest version of each line that an instance may have room for."""

        def enter(min_version: int) -> None:
            first = queue.first(min_version)
            if first is not None and first.queue_key is not None:
                heapq.heappush(lines, (first.queue_key, min_version))

        for min_version in queue.versions:
            enter(min_version)
        while lines and (limit is None or len(given) < limit):
            _, min_version = heapq.heappop(lines)
            best = self._open.best(min_version)
            if best is None:
                continue  # nor will there be one before the next call: instances only fill meanwhile
            sample, instance = self._next(min_version, best)
            self._placement.assign(sample, instance)
            self._open.enter(instance)
            given.append((sample, instance))
            enter(min_version)
        return given

    def keeps_prefix(self, sample: PlacedSample, home: Instance, other: Instance) -> bool:
        """Whether the sample is better off at `home`, which has what its prompt begins with, than at the other."""
        if not home.has_prefix_of(sample) or not home.accepts(sample):
            return False
        if home is other:
            return True
        load, typical = self._placement.load, self._placement.queue.typical_tokens
        beside = len(home.counted) - (sample.counted_at is home)
        there_s = load.taken_s(other, sample, len(other.counted), typical)
        gain = 1.0 + self._placement.settings.home_gain_share
        return load.taken_s(home, sample, beside, typical) <= gain * there_s

    def backlog_s(self) -> float:
        """How long the queue will go on evening out the instances by itself."""
        load, queue = self._placement.load, self._placement.queue
        return queue.tokens / load.rate_tokens_s if queue and load.rate_tokens_s > 0 else 0.0

    def _next(self, min_version: int, best: Instance) -> tuple[PlacedSample, Instance]:
        """The sample to give out when `best` has room, to `best` or to an instance that has its group's prompt.

        It is the first of its line, unless all instances that have its prompt are full. Then it may be one whose
        group's prompt is at `best`, or one of a new group; but a group is passed over only so often.
        """
        queue, settings = self._placement.queue, self._placement.settings
        first = queue.first(min_version)
        assert first is not None, "an empty line was asked for its first sample"
        if first.prefix is not None:
            home = self._placement.instances.get(first.prefix.instance)
            stays = home is not None and home.has_room and self.keeps_prefix(first, home, best)
            return first, home if home is not None and stays else best
        group = queue.groups[first.group]
        if not group.prompt_at or best in group.prompt_at:
            return first, best
        saved = first.prompt_tokens * settings.prefill_cost
        able = [one for one in group.prompt_at if one.has_room and one.version >= min_version]
        if able:
            left_s, slot_s = self._placement.load.left_s, self._open.slot_s
            home = min(able, key=lambda one: (left_s(one) + slot_s(one), one.number))
            longer_s = left_s(home) + slot_s(home) - left_s(best) - slot_s(best)
            stays = longer_s - self.backlog_s() <= saved / best.rate_tokens_s
            return first, home if stays else best
        patience = settings.sticky_patience * len(self._placement.instances)
        is_worth_it = not first.done_tokens and saved >= settings.sticky_worth * first.expected
        if is_worth_it and group.passed < patience:
            other = queue.first_with_prompt_at(best) or queue.first_of_new_group(min_version)
            if other is not None and best.version >= other.min_version:
                group.passed += 1
                return other, best
        return first, best
