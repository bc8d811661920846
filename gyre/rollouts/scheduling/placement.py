"""Which instance has which sample: the one place where that is written down.

A sample is queued, at an instance, migrating between two, or nowhere (its policy is not served yet, say). Whoever wants
to know reads `PlacedSample` and `Instance`; whoever decides something enters it here, and queue and load follow.

Invariants:
- *one place*: a sample is queued or has one holder, never both, and it counts in the load of at most one instance:
  that of its holder, or of the instance it migrates to;
- *whose holder leaves is free*: an instance that leaves holds nothing afterwards, and what migrated to it counts at
  its holder again.

This module must not know why a sample is anywhere, or what its tokens are.
"""

from __future__ import annotations

import math

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.lengths import LengthModel
from gyre.rollouts.scheduling.load import FleetLoad
from gyre.rollouts.scheduling.routing_settings import RoutingSettings
from gyre.rollouts.scheduling.sample_queue import SampleQueue


class Placement:
    def __init__(self, lengths: LengthModel | None = None, settings: RoutingSettings | None = None) -> None:
        self.settings = settings or RoutingSettings()
        self.instances: dict[str, Instance] = {}
        self.queue = SampleQueue()
        self.load = FleetLoad(lengths or LengthModel(), self.settings)
        self._joins = 0

    # -- instances ----------------------------------------------------------------------------------

    def join(
        self,
        name: str,
        *,
        incarnation: str = "",
        max_running: int,
        kv_tokens: int,
        rate_tokens_s: float | None = None,
        admitted: bool = True,
    ) -> Instance:
        """Raises ValueError where an instance of this name is here: it leaves first, so that its samples are
        accounted for."""
        if name in self.instances:
            raise ValueError(f"instance {name} is already here; it leaves before it joins again")
        if max_running < 1 or kv_tokens < 1:
            raise ValueError(
                f"instance {name} offers {max_running} slots and {kv_tokens} tokens of KV memory"
            )
        self._joins += 1
        slots = self._slots(max_running)
        instance = Instance(name, incarnation, self._joins, max_running, slots, kv_tokens, admitted=admitted)
        self.instances[name] = instance
        self.load.join(instance, rate_tokens_s)
        return instance

    def resize(self, instance: Instance, *, max_running: int, kv_tokens: int) -> None:
        """The instance's engine takes this much at once. It keeps what it has."""
        instance.max_running, instance.slots = max_running, self._slots(max_running)
        instance.kv_tokens = kv_tokens
        self.load.changed[instance] = None

    def _slots(self, max_running: int) -> int:
        overcommit = self.settings.overcommit
        return max_running + (math.ceil(max_running * overcommit) if overcommit > 0 else 0)

    def leave(self, instance: Instance) -> list[PlacedSample]:
        """Forget the instance. Returns the samples that it held, which are nowhere now."""
        del self.instances[instance.name]
        orphans = list(instance.held.values())
        for sample in orphans:
            self.take_away(sample)
        for sample in list(instance.counted.values()):  # on their way to here
            assert sample.holder is not None, (
                f"sample {sample.key} counts at {instance.name} and has no holder"
            )
            self._count_elsewhere(sample, sample.holder)
        self.load.leave(instance)
        instance.admitted = False
        instance.heap_entry += 1
        return orphans

    def admit(self, instance: Instance, admitted: bool) -> None:
        """Whether the instance may be given samples. It keeps what it has."""
        before, instance.admitted = instance.accepting, admitted
        if instance.accepting != before:
            self.load.accepting_changed(instance)

    def serve(self, instance: Instance, version: int) -> None:
        """The instance has this policy version now; -1 for none."""
        instance.version = version
        instance.heap_entry += 1
        self.load.changed[instance] = None

    def try_alone(self, instance: Instance, sample: PlacedSample | None) -> None:
        """Nothing new comes to the instance while it tries this sample, which it has; None when it has tried it."""
        before, instance.on_trial = instance.accepting, sample
        if instance.accepting != before:
            self.load.accepting_changed(instance)

    # -- samples ------------------------------------------------------------------------------------

    def enqueue(self, sample: PlacedSample, done_tokens: int) -> None:
        """Take the sample from its holder; another instance goes on with it."""
        self.take_away(sample)
        self.load.predict(sample, float(done_tokens))
        self.queue.add(sample)

    def assign(self, sample: PlacedSample, instance: Instance) -> None:
        """Give a queued sample to the instance."""
        self.queue.take(sample)
        self._hold(sample, instance)

    def place(self, sample: PlacedSample, instance: Instance, done_tokens: int) -> None:
        """Give the sample to the instance, wherever it was and whether the instance has room or not."""
        self.take_away(sample)
        self.load.predict(sample, float(done_tokens))
        self._hold(sample, instance)

    def recall(self, sample: PlacedSample) -> None:
        """Recall the sample from its holder; it goes on wherever there is room then."""
        sample.recalled = True

    def migrate(self, sample: PlacedSample, target: Instance, now: float) -> None:
        """Recall the sample from its holder, so that it goes on at the target."""
        sample.recalled = True
        sample.moved_at = now
        sample.moves += 1
        self._count_elsewhere(sample, target)

    def take_away(self, sample: PlacedSample) -> None:
        """Remove the sample from its holder and the queue. Harmless for one that is nowhere."""
        if sample.queue_key is not None:
            self.queue.withdraw(sample)
            return
        holder = sample.holder
        if holder is not None:
            holder.staying -= sample.counted_at is holder
            del holder.held[sample.key]
            sample.holder, sample.recalled = None, False
            if holder.on_trial is sample:
                self.try_alone(holder, None)
        if sample.counted_at is not None:
            self._uncount(sample, sample.counted_at)

    def finish(self, sample: PlacedSample, length: int) -> None:
        """The sample is done, with so many tokens in all."""
        self.load.lengths.observe(length)
        self.take_away(sample)

    def _hold(self, sample: PlacedSample, instance: Instance) -> None:
        sample.holder = instance
        instance.held[sample.key] = sample
        instance.staying += 1
        self._count(sample, instance)

    def _count(self, sample: PlacedSample, instance: Instance) -> None:
        sample.counted_at = instance
        instance.counted[sample.key] = sample
        is_first = self.queue.prompt_arrived(sample.group, instance)
        self.load.add(sample, instance, prompt_tokens=sample.prompt_tokens if is_first else 0)

    def _uncount(self, sample: PlacedSample, instance: Instance) -> None:
        sample.counted_at = None
        del instance.counted[sample.key]
        was_last = self.queue.prompt_left(sample.group, instance)
        self.load.remove(sample, instance, prompt_tokens=sample.prompt_tokens if was_last else 0)

    def _count_elsewhere(self, sample: PlacedSample, target: Instance) -> None:
        source = sample.counted_at
        assert source is not None, f"sample {sample.key} is at no instance"
        done_tokens = source.done_tokens(sample)
        source.staying -= sample.holder is source
        target.staying += sample.holder is target
        self._uncount(sample, source)
        self.load.predict(sample, done_tokens)
        self._count(sample, target)
