"""Which samples move while that is still cheap: what was dealt to whoever was ready first is dealt again when others are.

With a new policy version the first instance that has it gets all that waits, for a slot that stands free earns nothing.
The others are ready a moment later, or never, and nothing waits for them. Those that come take over their share, by
what each is predicted to take for all that it has: first what its holder could not begin, then what has the least to do
again.

Invariants:
- *no sample waits beside a free slot*: after `deal()`, no sample stands beyond its instance's slots while an accepting
  instance that may have it has a free one; but for samples that are being recalled, are tried where they are, or rest;
- *begins at once*: a sample moves only to an instance with a free slot, which counts as taken from then on;
- *cheap*: a sample that may have begun moves only while what it has to do again costs less than a share of what it is
  still to get, and only if it ends sooner by more than the move takes;
- *bounded*: a sample moves so `cheap_moves` times, and after that once in `move_cooldown_s`.

This module must not know engines, sockets or the clock: `now` is an argument.
"""

from __future__ import annotations

import heapq
import math
from itertools import islice

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.placement import Placement
from gyre.rollouts.scheduling.rebalancing import CANDIDATES, Move
from gyre.rollouts.scheduling.router import OpenInstances, Router

EVEN_EVERY_S = 0.05
"""Instances are compared no more often: it is a look at each of them, and in a fleet of a thousand slots free all the
time."""


class Dealing:
    """Decisions over a placement. Each move is entered there at once, since the next one builds on it."""

    def __init__(self, placement: Placement, open_instances: OpenInstances, router: Router) -> None:
        self._placement = placement
        self._settings = placement.settings
        self._open = open_instances
        self._router = router
        self._evened_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether a slot came for which `deal` has not compared the instances yet."""
        return self._open.has_news

    def deal(self, now: float) -> list[Move]:
        """The moves that a slot brings which has become free, or can be used for more samples than before. Where
        nothing of the kind came since the last time, this costs nothing."""
        self._open.refresh()
        if not self._open.has_news:
            return []
        moves = self._unbegun(now)
        if now - self._evened_at >= EVEN_EVERY_S:
            moves += self.even_out(now)
            self._open.has_news = False
        return moves

    def even_out(self, now: float) -> list[Move]:
        """The cheap moves that even out the queues, from the longest to the shortest."""
        self._evened_at = now
        self._open.refresh()
        if not self._open.free_slots():
            return []
        moves: list[Move] = []
        begun: set[Instance] = set()
        left_s = self._placement.load.left_s
        sources = [
            (-left_s(one), one.number, one) for one in self._placement.instances.values() if one.counted
        ]
        heapq.heapify(sources)
        while sources:
            _, number, source = heapq.heappop(sources)
            candidates = self._candidates(source, now)
            target = self._open.best(candidates[0].min_version) if candidates else None
            if target is None or not target.has_free_slot:
                continue
            if source is target or (source not in begun and not self._pays(source, target)):
                continue
            sample = self._cheap(candidates, source, target)
            if sample is None:
                continue
            begun.add(source)
            moves.append(self._move(sample, source, target, now))
            heapq.heappush(sources, (-left_s(source), number, source))
        return moves

    def _unbegun(self, now: float) -> list[Move]:
        """The moves of samples that stand beyond their instances' slots, to whoever has a free one."""
        moves: list[Move] = []
        if not self._open.free_slots():
            return moves
        for source in self._open.crowded():
            beyond = len(source.counted) - source.max_running
            for sample in list(islice(reversed(source.counted.values()), beyond)):
                if not self._may_move(sample, source, now):
                    continue
                able = [one for one in self._open.free_slots() if one.accepts(sample)]
                if able:
                    target = min(able, key=lambda one: (one.drain_s, one.number))
                    moves.append(self._move(sample, source, target, now))
        return moves

    def _pays(self, source: Instance, target: Instance) -> bool:
        """Whether the source is done so much sooner where it shares with the target that it is worth the moves. While
        samples queue, they even out the instances without any."""
        load = self._placement.load
        now_s = load.left_s(source)
        given = (len(source.counted) - len(target.counted)) // 2
        if given <= 0:
            given = 1
        share = source.outstanding_tokens * given / len(source.counted)
        gain_s = now_s - load.left_s(source, more=-given, more_tokens=-share) - self._router.backlog_s()
        return gain_s > max(self._settings.deal_gain_s, self._settings.deal_gain_share * now_s)

    def _may_move(self, sample: PlacedSample, source: Instance, now: float) -> bool:
        if sample.stays or sample.recalled or sample.holder is not source:
            return False
        rested = now - sample.moved_at >= self._settings.move_cooldown_s
        return rested or sample.moves < self._settings.cheap_moves

    def _candidates(self, source: Instance, now: float) -> list[PlacedSample]:
        """Those of the source's newest samples that may move."""
        newest = islice(reversed(source.counted.values()), CANDIDATES)
        return [sample for sample in newest if self._may_move(sample, source, now)]

    def _cheap(
        self, candidates: list[PlacedSample], source: Instance, target: Instance
    ) -> PlacedSample | None:
        """The first of the source's candidates whose move is cheap, and with which the target is done sooner than the
        source without it."""
        prompts, load = self._placement.queue.groups, self._placement.load
        longest_s = load.left_s(source) - self._settings.move_s
        for sample in candidates:
            if target.version < sample.min_version:
                continue
            redone = source.done_tokens(sample)
            if target not in prompts[sample.group].prompt_at:
                redone += sample.prompt_tokens
            again = redone * self._settings.prefill_cost
            if again > self._settings.cheap_share * sample.expected:
                continue
            if load.left_s(target, more=1, more_tokens=sample.expected + again) < longest_s:
                return sample
        return None

    def _move(self, sample: PlacedSample, source: Instance, target: Instance, now: float) -> Move:
        self._placement.migrate(sample, target, now)
        self._open.enter(source)
        self._open.enter(target)
        return Move(sample, source, target)
