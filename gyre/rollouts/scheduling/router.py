"""Which instance generates which sample, and which samples move when instances come, go or slow down.

Join the shortest queue, measured in the time that an instance needs to drain what it holds and one sample more
(predicted tokens by measured rate), with three amendments: a sample stays with the instance that has its group's
prompt while the prefill saved is worth more than the imbalance, and lets others pass for a while when that one is
full; imbalance counts only as far as the queue behind it would not even it out by itself; and where all slots are in
use, the wait for one counts. Rebalancing is the
ancestor's Algorithm 2 (RLBoost, arXiv 2510.19225) with the gain of each move predicted, prefix recomputation
included.

Invariants:
- *one place*: every sample known here is either queued or with exactly one instance;
- *able*: no sample is given to an instance that left, does not accept, or has no room;
- *within admission*: an instance is never given more than its slots; beyond its KV memory at most one sample, so
  that no sample is too large to ever run. What it holds when it comes back it keeps (`place`);
- *work-conserving*: after `assign()` nothing is queued while an accepting instance has room;
- *no ping-pong*: a move shortens the longer of two queues by more than a margin, and the sample then stays
  for a while;
- *near-linear*: an assignment costs O(log instances); news from an instance costs O(1) until the next decision.

A group's id is its position in the job's sequence of prompts, so that lower ids are older and go first.

This module must not know engines, sockets, the ledger or the time: `now` is an argument.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from gyre.rollouts.scheduling.lengths import LengthModel

_CANDIDATES = 32
"""How many of a source's samples are looked at for one that may move."""

_PREDICTIONS = 512
"""About how many samples' remainders are predicted again in one decision, so that none takes long."""

_LIGHT_USE = 0.25
"""Below this share of its slots an instance's samples do not slow each other down much."""

_NARROWEST, _WIDEST = 0.2, 1.5
"""Of the margin by which KV memory is reserved."""

_ADAPT_TOKENS = 32.0
"""How far each sample has to grow between two changes of that margin."""


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    prefill_cost: float = 0.1
    """What a prompt token costs, in generated tokens: an engine's decode rate over its prefill rate."""
    overcommit: float = 0.06
    """Samples handed out beyond `max_running`, as a share of it (at least one), so that no slot waits for a round
    trip. 0 for none."""
    sticky_worth: float = 0.02
    """A sample waits for its group's instance only where its prompt costs this share of what it is to get."""
    sticky_patience: float = 4.0
    """And only while no more samples were given out before it than so many times the instances."""
    rate_smoothing: float = 0.3
    """Weight of the newest measurement of a rate."""
    kv_full: float = 0.92
    """Share of an instance's KV memory in use above which it is given less."""
    kv_roomy: float = 0.80
    """Share in use below which it is given more."""
    move_gain_s: float = 2.0
    """A move must be predicted to win more than this."""
    move_gain_share: float = 0.2
    """And more than this share of the source's drain time."""
    move_cooldown_s: float = 30.0
    """For so long a sample that was moved is not moved again."""
    moves_per_s: float = 32.0
    """How many moves rebalancing may ask for over time."""
    moves_burst: int = 128
    """And how many at once."""
    tail_share: float = 0.25
    """Stragglers are looked for when no more than this share of the fleet's slots is in use."""
    straggler_factor: float = 1.5
    """A straggler would take this many times as long where it is as on an idle instance."""


class Assignment(NamedTuple):
    sample: int
    instance: str


class Move(NamedTuple):
    """Abort `sample` on `source` and continue it on `target`. The router already counts it at `target`."""

    sample: int
    source: str
    target: str


class QueueKey(NamedTuple):
    """Continued samples first, then older groups, then in the order of submission."""

    fresh: bool
    group: int
    order: int


@dataclass(slots=True, eq=False)
class _Sample:
    id: int
    group: int
    prompt_tokens: int
    done_tokens: float
    """As of `clock`: exact when submitted, then inferred from how far the instance's samples got."""
    max_new_tokens: int
    expected: float
    """Tokens predicted to remain, as of `clock`."""
    kv_tokens: float
    """What it takes of KV memory when done, without its prompt."""
    key: QueueKey
    instance: _Instance | None = None
    clock: float = 0.0
    moved_at: float = -math.inf


@dataclass(slots=True, eq=False)
class _Instance:
    name: str
    order: int
    max_running: int
    slots: int
    kv_tokens: int
    rate: float
    """Tokens/s that it makes with all slots in use, as far as measurements tell."""
    measured: bool = False
    accepting: bool = True
    held: dict[int, _Sample] = field(default_factory=dict)
    promised: float = 0.0
    """Predicted remaining tokens of all held, as of their last prediction."""
    made: float = 0.0
    """Of these, generated since."""
    clock: float = 0.0
    """Tokens that one running sample has got so far: a decode step gives each of them one."""
    kv_reserved: float = 0.0
    """Tokens in KV memory when all held are done, a group's prompt counted once."""
    kv_margin: float = 0.9
    """`kv_tokens` times this may be reserved. Adapts: not all samples are at their longest at once."""
    adapted_at: float = 0.0
    """The clock when that was last looked into."""
    speed: float = 0.0
    """Tokens/s of one sample at the present load; 0 before measured."""
    best_speed: float = 0.0
    """And with few beside it."""
    running_before: int = 0
    """At the measurement before."""
    wants: list[int] = field(default_factory=list)
    """Heap of groups that have their prompt here and samples in the queue. Void where they have not."""
    version: int = 0
    """Of its entry in the heap; older entries are void."""

    @property
    def running(self) -> int:
        return min(len(self.held), self.max_running)

    @property
    def is_open(self) -> bool:
        """Accepts, and has room. An empty instance has room for a sample of any size."""
        if not self.accepting or len(self.held) >= self.slots:
            return False
        return not self.held or self.kv_reserved < self.kv_tokens * self.kv_margin

    @property
    def is_lightly_used(self) -> bool:
        return len(self.held) < self.max_running * _LIGHT_USE

    @property
    def outstanding(self) -> float:
        return max(self.promised - self.made, float(len(self.held)))

    @property
    def drain_s(self) -> float:
        return max(self.promised - self.made, float(len(self.held))) / self.rate

    def done_tokens(self, sample: _Sample) -> float:
        return min(sample.done_tokens + self.clock - sample.clock, float(sample.max_new_tokens))


@dataclass(slots=True, eq=False)
class _Group:
    live: int = 0
    """Its samples known here."""
    homes: dict[_Instance, int] = field(default_factory=dict)
    """Instances that hold its prompt, and how many of its samples."""
    queued: int = 0
    queue: list[tuple[QueueKey, int]] = field(default_factory=list)
    """Heap of its queued samples; entries of those that no longer are are void."""
    passed: int = 0
    """How often its samples were at the head of the queue and another one was given out."""


class Router:
    """Incremental: each call tells what happened, and `assign`, `rebalance` and `stragglers` decide."""

    def __init__(self, lengths: LengthModel | None = None, settings: RoutingSettings | None = None) -> None:
        self.lengths = lengths or LengthModel()
        self.settings = settings or RoutingSettings()
        self.operations = 0
        """Steps of work done so far, for tests of how cost grows."""
        self._instances: dict[str, _Instance] = {}
        self._samples: dict[int, _Sample] = {}
        self._groups: dict[int, _Group] = {}
        self._queue: list[tuple[QueueKey, int]] = []
        """Heap of all queued samples; entries of those that no longer are are void."""
        self._new_groups: list[int] = []
        """Heap of groups with queued samples whose prompt no instance has. Void where one has."""
        self._queued = 0
        self._queued_tokens = 0.0
        self._submissions = 0
        self._one_more = 0.0
        """What has lately been expected of a submitted sample."""
        self._one_more_used = 0.0
        """And as of which the heap's entries are."""
        self._joins = 0
        self._open: list[tuple[float, int, int, _Instance]] = []
        """Heap of (drain time with one more sample, join order, version, instance) of those with room. Entries of
        an older version are void."""
        self._dirty: dict[_Instance, None] = {}
        self._rates = 0.0
        self._measured = 0
        self._unmeasured: dict[_Instance, None] = {}
        self._typical_used = 1.0
        """The typical rate that the unmeasured were last credited with."""
        self._fleet_rate = 0.0
        """Of the accepting instances."""
        self._moves_left = float(self.settings.moves_burst)
        self._moves_at = -math.inf

    # -- instances ----------------------------------------------------------------------------------

    def join(
        self, instance: str, *, max_running: int, kv_tokens: int, rate_tokens_s: float | None = None
    ) -> None:
        """Raises ValueError where it is already here: it leaves first, so that its samples are accounted for."""
        if instance in self._instances:
            raise ValueError(f"instance {instance} is already here; it leaves before it joins again")
        if max_running < 1 or kv_tokens < 1:
            raise ValueError(
                f"instance {instance} offers {max_running} slots and {kv_tokens} tokens of KV memory"
            )
        extra = math.ceil(max_running * self.settings.overcommit) if self.settings.overcommit > 0 else 0
        self._joins += 1
        joined = _Instance(
            name=instance,
            order=self._joins,
            max_running=max_running,
            slots=max_running + extra,
            kv_tokens=kv_tokens,
            rate=self._typical_used,
        )
        self._instances[instance] = joined
        self._unmeasured[joined] = None
        self._fleet_rate += joined.rate
        if rate_tokens_s:
            self._set_rate(joined, rate_tokens_s)
        self._dirty[joined] = None

    def leave(self, instance: str) -> list[int]:
        """Forgets the instance and its samples, and names these: they are submitted again as far as they got."""
        left = self._instances.pop(instance, None)
        if left is None:
            return []
        if left.measured:
            self._rates -= left.rate
            self._measured -= 1
        self._unmeasured.pop(left, None)
        if left.accepting:
            self._fleet_rate -= left.rate
        left.accepting = False
        left.version += 1
        self._dirty.pop(left, None)
        samples = list(left.held)
        for sample in list(left.held.values()):
            self._forget(sample)
        return samples

    def set_accepting(self, instance: str, accepting: bool) -> None:
        """Whether it takes new samples: not while it loads weights or drains. What it holds, it keeps."""
        changed = self._instances.get(instance)
        if changed is None or changed.accepting == accepting:
            return
        changed.accepting = accepting
        self._fleet_rate += changed.rate if accepting else -changed.rate
        self._dirty[changed] = None

    def observe(self, instance: str, *, rate_tokens_s: float, kv_used_tokens: int) -> None:
        """What the instance measured of itself over its last interval.

        A rate under part load is no capacity: with `b` of `s` slots in use, an instance that makes `r` tokens/s
        would make between `r` and `r * s / b` with all of them. The estimate moves to the nearest end of that
        interval, so that an idle instance is not taken for a slow one, and a slow one is noticed all the same.
        """
        seen = self._instances.get(instance)
        if seen is None:
            return
        if seen.running and rate_tokens_s > 0:
            self._measure(seen, rate_tokens_s)
        else:
            seen.running_before = seen.running
        self._adapt(seen, kv_used_tokens / seen.kv_tokens)
        self._dirty[seen] = None

    def generated(self, instance: str, tokens: int) -> None:
        """The instance's samples got `tokens` further, together. O(1)."""
        busy = self._instances.get(instance)
        if busy is None or not busy.held:
            return
        busy.made += tokens
        busy.clock += tokens / busy.running
        self._dirty[busy] = None

    # -- samples ------------------------------------------------------------------------------------

    def submit(
        self, sample: int, *, group: int, prompt_tokens: int, done_tokens: int, max_new_tokens: int
    ) -> bool:
        """Queue a sample. `max_new_tokens` is its limit in all, `done_tokens` included. False if it is known here."""
        if sample in self._samples:
            return False
        self._submissions += 1
        expected = max(self.lengths.expected_remaining(done_tokens, max_new_tokens), 1.0)
        key = QueueKey(done_tokens == 0, group, self._submissions)
        self._samples[sample] = _Sample(
            sample,
            group,
            prompt_tokens,
            float(done_tokens),
            max_new_tokens,
            expected,
            done_tokens + expected,
            key,
        )
        self._enqueue(self._samples[sample])
        self._one_more += (expected - self._one_more) * (0.02 if self._one_more else 1.0)
        return True

    def progressed(self, sample: int, done_tokens: int) -> None:
        """The sample has exactly so many tokens. Optional: sharpens what `generated` tells in sum. O(1)."""
        known = self._samples.get(sample)
        if known is None or known.instance is None:
            return
        instance = known.instance
        self._discount(instance, known)
        instance.kv_reserved -= known.kv_tokens
        self._predict(known, float(done_tokens))
        known.clock = instance.clock
        instance.promised += known.expected
        instance.kv_reserved += known.kv_tokens
        self._dirty[instance] = None

    def finished(self, sample: int, length: int) -> bool:
        """The sample is done, with `length` tokens in all. False if it is not known here: told twice, or taken back."""
        known = self._samples.get(sample)
        if known is None:
            return False
        self.lengths.observe(length)
        self._forget(known)
        return True

    def withdraw(self, sample: int) -> bool:
        """Nobody needs the sample any more."""
        known = self._samples.get(sample)
        if known is None:
            return False
        self._forget(known)
        return True

    # -- reading ------------------------------------------------------------------------------------

    def held_by(self, instance: str) -> list[int]:
        """The instance's samples, in the order in which it got them."""
        holder = self._instances.get(instance)
        return list(holder.held) if holder is not None else []

    def instance_of(self, sample: int) -> str | None:
        """None where it is queued or not known."""
        known = self._samples.get(sample)
        return known.instance.name if known is not None and known.instance is not None else None

    def queued(self) -> int:
        return self._queued

    @property
    def queued_tokens(self) -> float:
        """Predicted tokens of samples that no instance has."""
        return max(self._queued_tokens, 0.0)

    @property
    def fleet_rate_tokens_s(self) -> float:
        """What the accepting instances are estimated to make together, with all slots in use."""
        return max(self._fleet_rate, 0.0)

    def outstanding_tokens(self, instance: str) -> float:
        """Predicted tokens that the instance has still to generate."""
        holder = self._instances.get(instance)
        return holder.outstanding if holder is not None and holder.held else 0.0

    def drain_s(self, instance: str) -> float:
        """And the seconds that it will take, at its measured rate."""
        holder = self._instances.get(instance)
        return holder.drain_s if holder is not None and holder.held else 0.0

    def rate_tokens_s(self, instance: str) -> float:
        """What it is estimated to make with all slots in use; 0 where it is not known."""
        holder = self._instances.get(instance)
        return holder.rate if holder is not None else 0.0

    def sample_tokens_s(self, instance: str) -> float:
        """How fast one sample grows on it, with few beside it; 0 before measured."""
        holder = self._instances.get(instance)
        return holder.best_speed if holder is not None else 0.0

    def has_room(self, instance: str) -> bool:
        holder = self._instances.get(instance)
        return holder is not None and holder.is_open

    # -- deciding -----------------------------------------------------------------------------------

    def assign(self, limit: int | None = None) -> list[Assignment]:
        """Give queued samples to instances with room, at most `limit` of them."""
        self._freshen()
        given: list[Assignment] = []
        while self._queued and (limit is None or len(given) < limit):
            best = self._best()
            if best is None:
                break
            sample, chosen = self._next(best)
            self._dequeue(sample)
            self._place(sample, chosen)
            self._offer(chosen)
            given.append(Assignment(sample.id, chosen.name))
        return given

    def place(self, sample: int, instance: str) -> bool:
        """Count a queued sample as given to this instance, whether it has room or not: it has it already. False where
        either is not known, or the sample is somewhere."""
        known, holder = self._samples.get(sample), self._instances.get(instance)
        if known is None or known.instance is not None or holder is None:
            return False
        self._dequeue(known)
        self._place(known, holder)
        self._dirty[holder] = None
        return True

    def rebalance(self, now: float) -> list[Move]:
        """The moves that even out the queues. Call when instances joined, left or slowed down."""
        self._freshen()
        budget = self._budget(now)
        moves: list[Move] = []
        sources = [
            (-holder.drain_s, holder.order, holder) for holder in self._instances.values() if holder.held
        ]
        heapq.heapify(sources)
        self.operations += len(sources)
        while sources and len(moves) < budget:
            target = self._best()
            if target is None:
                break
            _, order, source = heapq.heappop(sources)
            self.operations += 1
            if source.drain_s - target.drain_s <= self._needed_gain_s(source):
                break
            sample = None if source is target else self._movable(source, target, now)
            if sample is None:
                continue
            moves.append(self._move(sample, target, now))
            heapq.heappush(sources, (-source.drain_s, order, source))
            self._offer(source)
            self._offer(target)
        self._moves_left -= len(moves)
        return moves

    def stragglers(self, now: float) -> list[Move]:
        """The long tail: few samples are left, some on an instance that is much slower than one that stands idle."""
        self._freshen()
        slots = sum(holder.slots for holder in self._instances.values() if holder.accepting)
        if self._queued or len(self._samples) > self.settings.tail_share * slots:
            return []
        speeds = [holder.best_speed for holder in self._instances.values() if holder.best_speed]
        if not speeds:
            return []
        typical = sum(speeds) / len(speeds)
        idle = sorted(
            (holder for holder in self._instances.values() if holder.is_open and holder.is_lightly_used),
            key=lambda holder: (-(holder.best_speed or typical), holder.order),
        )
        slow = sorted(
            (
                (self._left_s(sample, typical), sample)
                for sample in self._samples.values()
                if now - sample.moved_at >= self.settings.move_cooldown_s
            ),
            key=lambda pair: (-pair[0], pair[1].key),
        )
        self.operations += len(idle) + len(slow)
        budget = self._budget(now)
        moves: list[Move] = []
        at = 0
        for here_s, sample in slow:
            while at < len(idle) and not (idle[at].is_open and idle[at].is_lightly_used):
                at += 1
            if at == len(idle) or len(moves) >= budget:
                break
            target = idle[at]
            there_s = self._left_elsewhere_s(sample, target, typical)
            if (
                target is not sample.instance
                and here_s > self.settings.straggler_factor * there_s
                and here_s - there_s > self.settings.move_gain_s
            ):
                moves.append(self._move(sample, target, now))
        self._moves_left -= len(moves)
        return moves

    # -- choosing an instance -----------------------------------------------------------------------

    @property
    def _typical_rate(self) -> float:
        return self._rates / self._measured if self._measured else 1.0

    def _freshen(self) -> None:
        """Take into account what instances reported since the last decision."""
        if not 0.8 * self._one_more <= self._one_more_used <= 1.25 * self._one_more:
            self._one_more_used = self._one_more
            self._dirty.update(dict.fromkeys(self._instances.values()))
        budget = _PREDICTIONS
        for instance in self._dirty:
            # Who is beyond the budget is as good as its last prediction, until its next news.
            if instance.made > instance.promised / 4 and budget > 0:
                budget -= len(instance.held)
                self._predict_again(instance)
            self._offer(instance)
        self._dirty.clear()
        if len(self._open) > 4 * len(self._instances) + 64:
            self._open = [entry for entry in self._open if entry[2] == entry[3].version]
            heapq.heapify(self._open)
            self.operations += len(self._open)

    def _offer(self, instance: _Instance) -> None:
        """Enter the instance into the heap as it is now, and void its earlier entry."""
        instance.version += 1
        self.operations += 1
        if instance.is_open:
            done_s = (instance.outstanding + self._one_more_used) / instance.rate + self._slot_s(instance)
            heapq.heappush(self._open, (done_s, instance.order, instance.version, instance))

    def _slot_s(self, instance: _Instance) -> float:
        """What a sample that is given to the instance waits there while it could run elsewhere: for another one's end,
        where all slots are in use."""
        if len(instance.held) < instance.max_running:
            return 0.0
        return self._one_more_used * instance.max_running / instance.rate

    def _best(self) -> _Instance | None:
        """The instance with room that would be done with one more sample first."""
        while self._open:
            _, _, version, instance = self._open[0]
            self.operations += 1
            if version == instance.version:
                return instance
            heapq.heappop(self._open)
        return None

    def _next(self, best: _Instance) -> tuple[_Sample, _Instance]:
        """Which sample is given out when `best` has room, and to whom: to `best`, or to its group's instance.

        The head of the queue, unless its group's instances have no room. Then one whose group's prompt is at `best`,
        or one of a new group; but it is passed over only so often.
        """
        head = self._head(self._queue)
        assert head is not None
        group = self._groups[head.group]
        if not group.homes or best in group.homes:
            return head, best
        self.operations += len(group.homes)
        able = [home for home in group.homes if home.is_open]
        saved = head.prompt_tokens * self.settings.prefill_cost
        if able:
            home = min(able, key=lambda one: (one.drain_s + self._slot_s(one), one.order))
            longer_s = home.drain_s + self._slot_s(home) - best.drain_s - self._slot_s(best)
            stays = longer_s - self._backlog_s <= saved / best.rate
            return head, home if stays else best
        patience = self.settings.sticky_patience * len(self._instances)
        if head.key.fresh and saved >= self.settings.sticky_worth * head.expected and group.passed < patience:
            other = self._head_of(best.wants, best) or self._head_of(self._new_groups, None)
            if other is not None:
                group.passed += 1
                return other, best
        return head, best

    def _head(self, queue: list[tuple[QueueKey, int]]) -> _Sample | None:
        while queue:
            key, sample_id = queue[0]
            sample = self._samples.get(sample_id)
            self.operations += 1
            if sample is not None and sample.instance is None and sample.key == key:
                return sample
            heapq.heappop(queue)
        return None

    def _head_of(self, groups: list[int], home: _Instance | None) -> _Sample | None:
        """The next sample of the oldest of these groups that has its prompt at `home`, or at none."""
        while groups:
            group = self._groups.get(groups[0])
            self.operations += 1
            if group is not None and self._wants(group, home):
                return self._head(group.queue)
            heapq.heappop(groups)
        return None

    @staticmethod
    def _wants(group: _Group, home: _Instance | None) -> bool:
        return group.queued > 0 and (home in group.homes if home is not None else not group.homes)

    def _want(self, groups: list[int], group: int, home: _Instance | None) -> None:
        heapq.heappush(groups, group)
        most = home.slots if home is not None else len(self._groups)
        if len(groups) > 2 * most + 64:
            self.operations += len(groups)
            known = ((index, self._groups.get(index)) for index in set(groups))
            groups[:] = [index for index, found in known if found is not None and self._wants(found, home)]
            heapq.heapify(groups)

    def _enqueue(self, sample: _Sample) -> None:
        group = self._groups.setdefault(sample.group, _Group())
        group.live += 1
        group.queued += 1
        heapq.heappush(group.queue, (sample.key, sample.id))
        heapq.heappush(self._queue, (sample.key, sample.id))
        self._queued += 1
        self._queued_tokens += sample.expected
        if group.queued == 1:
            for home in group.homes:
                self._want(home.wants, sample.group, home)
            if not group.homes:
                self._want(self._new_groups, sample.group, None)

    def _dequeue(self, sample: _Sample) -> None:
        """The sample is about to be placed, or forgotten."""
        self._groups[sample.group].queued -= 1
        self._queued -= 1
        self._queued_tokens -= sample.expected
        if not self._queued:
            self._queue.clear()
            self._new_groups.clear()
            self._queued_tokens = 0.0

    @property
    def _backlog_s(self) -> float:
        """For how long the queue will go on evening out the instances by itself."""
        return (
            max(self._queued_tokens, 0.0) / self._fleet_rate if self._queued and self._fleet_rate > 0 else 0.0
        )

    # -- placing ------------------------------------------------------------------------------------

    def _place(self, sample: _Sample, instance: _Instance) -> None:
        instance.held[sample.id] = sample
        sample.instance, sample.clock = instance, instance.clock
        instance.promised += sample.expected
        group = self._groups[sample.group]
        if instance not in group.homes:
            instance.kv_reserved += sample.prompt_tokens
            group.passed = 0
            if group.queued:
                self._want(instance.wants, sample.group, instance)
        group.homes[instance] = group.homes.get(instance, 0) + 1
        instance.kv_reserved += sample.kv_tokens

    def _unplace(self, sample: _Sample) -> None:
        instance = sample.instance
        if instance is None:
            return
        self._discount(instance, sample)
        del instance.held[sample.id]
        sample.instance = None
        group = self._groups[sample.group]
        group.homes[instance] -= 1
        if not group.homes[instance]:
            del group.homes[instance]
            instance.kv_reserved -= sample.prompt_tokens
            if group.queued and not group.homes:
                self._want(self._new_groups, sample.group, None)
        instance.kv_reserved -= sample.kv_tokens
        if not instance.held:
            instance.promised = instance.made = instance.kv_reserved = 0.0
        self._dirty[instance] = None

    def _discount(self, instance: _Instance, sample: _Sample) -> None:
        """Take what the sample was to get, and what it is inferred to have got, out of the instance's sums."""
        instance.promised -= sample.expected
        instance.made = max(instance.made - (instance.clock - sample.clock), 0.0)

    def _forget(self, sample: _Sample) -> None:
        if sample.instance is None:
            self._dequeue(sample)
            if len(self._queue) > 2 * self._queued + 64:
                waiting = (known for known in self._samples.values() if known.instance is None)
                self._queue = [(known.key, known.id) for known in waiting if known is not sample]
                heapq.heapify(self._queue)
                self.operations += len(self._samples)
        else:
            self._unplace(sample)
        del self._samples[sample.id]
        group = self._groups[sample.group]
        group.live -= 1
        if not group.live:
            del self._groups[sample.group]

    def _predict_again(self, instance: _Instance) -> None:
        """From how far each sample is inferred to have got. After a quarter of what was promised: amortised O(1)."""
        promised = reserved = 0.0
        prompts: dict[int, int] = {}
        for position, sample in enumerate(instance.held.values()):
            # What was given beyond the engine's slots still waits there.
            done = instance.done_tokens(sample) if position < instance.max_running else sample.done_tokens
            self._predict(sample, done)
            sample.clock = instance.clock
            promised += sample.expected
            reserved += sample.kv_tokens
            prompts.setdefault(sample.group, sample.prompt_tokens)
        instance.promised, instance.made = promised, 0.0
        instance.kv_reserved = reserved + sum(prompts.values())
        self.operations += len(instance.held)

    def _predict(self, sample: _Sample, done_tokens: float) -> None:
        sample.done_tokens = done_tokens
        sample.expected = max(self.lengths.expected_remaining(done_tokens, sample.max_new_tokens), 1.0)
        sample.kv_tokens = done_tokens + sample.expected

    # -- moving -------------------------------------------------------------------------------------

    def _budget(self, now: float) -> float:
        refilled = self._moves_left + (now - self._moves_at) * self.settings.moves_per_s
        self._moves_left = min(refilled, float(self.settings.moves_burst))
        self._moves_at = now
        return math.floor(self._moves_left)

    def _needed_gain_s(self, source: _Instance) -> float:
        return (
            max(self.settings.move_gain_s, self.settings.move_gain_share * source.drain_s) + self._backlog_s
        )

    def _movable(self, source: _Instance, target: _Instance, now: float) -> _Sample | None:
        """One whose move pays. The newest first: it most likely still waits in the engine, or has the least to redo."""
        limit_s = source.drain_s - self._needed_gain_s(source) - target.drain_s
        for sample in islice(reversed(source.held.values()), _CANDIDATES):
            self.operations += 1
            if now - sample.moved_at < self.settings.move_cooldown_s:
                continue
            redone = source.done_tokens(sample) * self.settings.prefill_cost
            if target not in self._groups[sample.group].homes:
                redone += sample.prompt_tokens * self.settings.prefill_cost
            if (sample.expected + redone) / target.rate < limit_s:
                return sample
        return None

    def _move(self, sample: _Sample, target: _Instance, now: float) -> Move:
        source = sample.instance
        assert source is not None
        done = source.done_tokens(sample)
        self._unplace(sample)
        self._predict(sample, done)
        self._place(sample, target)
        sample.moved_at = now
        self._dirty.update({source: None, target: None})
        return Move(sample.id, source.name, target.name)

    # -- the long tail ------------------------------------------------------------------------------

    def _left_s(self, sample: _Sample, typical_speed: float) -> float:
        """How long the sample takes where it is, at the speed of one sample there."""
        instance = sample.instance
        if instance is None:
            return 0.0
        left = self.lengths.expected_remaining(instance.done_tokens(sample), sample.max_new_tokens)
        return left / (instance.speed or typical_speed)

    def _left_elsewhere_s(self, sample: _Sample, target: _Instance, typical_speed: float) -> float:
        """And on a target with few samples, prefix recomputation included."""
        done = sample.instance.done_tokens(sample) if sample.instance is not None else sample.done_tokens
        left = self.lengths.expected_remaining(done, sample.max_new_tokens)
        redone = (sample.prompt_tokens + done) * self.settings.prefill_cost
        return left / (target.best_speed or typical_speed) + redone / target.rate

    # -- measuring ----------------------------------------------------------------------------------

    def _measure(self, instance: _Instance, rate: float) -> None:
        running, before = instance.running, instance.running_before
        instance.running_before = running
        fewest = min(running, before)
        highest = rate * instance.max_running / fewest if fewest else math.inf
        smoothing = self.settings.rate_smoothing
        if instance.measured:
            toward = min(max(instance.rate, rate), highest)
            self._set_rate(instance, instance.rate + smoothing * (toward - instance.rate))
        elif fewest:
            first = min(max(instance.rate, rate), highest) if self._measured else math.sqrt(rate * highest)
            self._set_rate(instance, first)
        speed = rate / max((running + before) / 2.0, 1.0)
        instance.speed += (smoothing if instance.speed else 1.0) * (speed - instance.speed)
        if instance.speed > instance.best_speed:
            instance.best_speed = instance.speed
        elif instance.is_lightly_used:
            instance.best_speed += smoothing * (instance.speed - instance.best_speed)

    def _adapt(self, instance: _Instance, used_share: float) -> None:
        """Additive increase, multiplicative decrease, and neither before the last one could show.

        Memory fills and empties as slowly as samples grow: news that came before they grew by `_ADAPT_TOKENS` is
        old news; and what is beyond the margin by more than a tenth got there under a wider one, and a narrower one
        still would not make it go. Not in use is not free for good either: the increase is small and has an end.
        """
        if instance.clock - instance.adapted_at < _ADAPT_TOKENS:
            return
        instance.adapted_at = instance.clock
        budget = instance.kv_tokens * instance.kv_margin
        if used_share > self.settings.kv_full and instance.kv_reserved <= 1.1 * budget:
            instance.kv_margin = max(instance.kv_margin * 0.95, _NARROWEST)
        elif used_share < self.settings.kv_roomy and instance.kv_reserved >= budget:
            instance.kv_margin = min(instance.kv_margin + 0.01, _WIDEST)

    def _set_rate(self, instance: _Instance, rate: float) -> None:
        if instance.accepting:
            self._fleet_rate += rate - instance.rate
        if instance.measured:
            self._rates += rate - instance.rate
        else:
            self._rates += rate
            self._measured += 1
            instance.measured = True
            self._unmeasured.pop(instance, None)
        instance.rate = rate
        typical = self._typical_rate
        if not 0.9 < typical / self._typical_used < 1.1:
            self._typical_used = typical
            self.operations += len(self._unmeasured)
            for other in self._unmeasured:
                if other.accepting:
                    self._fleet_rate += typical - other.rate
                other.rate = typical
            self._dirty.update(self._unmeasured)
