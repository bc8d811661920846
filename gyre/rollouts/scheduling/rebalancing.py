"""Which samples move when instances come, go, load a policy or slow down.

With a new policy version the first instance that has it gets all that waits, for a slot that stands free earns nothing.
The others are ready a moment later, or never, and nothing waits for them: those that come take over their share while
that is cheap. What is dear to move moves by the ancestor's Algorithm 2 (RLBoost, arXiv 2510.19225), with the gain of
each move predicted, prefix recomputation included.

Invariants:
- *no sample waits beside a free slot*: after `deal()` no sample stands beyond its instance's slots while an instance
  that may have it has a free one; but for samples that are recalled already, are tried where they are, or rest, and
  for an agent's turn whose prefix is worth the wait (`Router.keeps_prefix`);
- *begins at once*: a sample moves only to an instance with a free slot, which counts as taken from then on;
- *no ping-pong*: a move leaves the target done sooner than the source was, by more than a margin. A sample moves at
  most `cheap_moves` times, and after that once in `move_cooldown_s`;
- *bounded*: moves that are not cheap are limited at once and over time;
- *its own policies*: a sample moves to no instance whose policy version is older than the sample accepts;
- *trials stay*: a sample that is being tried where it is, or was told to go already, does not move.

This module must not know engines, sockets or the clock: `now` is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.placement import Placement
from gyre.rollouts.scheduling.router import OpenInstances, Router

_CANDIDATES = 32
"""How many of a source's samples are looked at for one that may move."""

_EVEN_EVERY_S = 0.05
"""Slots that come bring no closer comparisons of all instances: each is a look at every one of them, and in a large
fleet slots come all the time."""


class Move(NamedTuple):
    """The source is to stop `sample`, so that it goes on at the target, in whose load it counts already."""

    sample: PlacedSample
    source: Instance
    target: Instance


class Gain(NamedTuple):
    """How much sooner an instance has to be done, in seconds and as a share of its time."""

    seconds: float
    share: float


class Rebalancing:
    """Decisions over a placement. Each move is entered there at once, since the next one builds on it."""

    def __init__(self, placement: Placement, open_instances: OpenInstances, router: Router) -> None:
        self._placement = placement
        self._settings = placement.settings
        self._load = placement.load
        self._open = open_instances
        self._router = router
        self._moves_left = float(self._settings.moves_burst)
        self._moves_at = -math.inf
        self._evened_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether a slot came for which the instances are not compared yet."""
        return self._open.has_news

    def deal(self, now: float) -> list[Move]:
        """The moves that a slot brings which has become free, or can be used for more samples than before. Where
        nothing of the kind came since the last time, this costs nothing."""
        self._open.refresh()
        if not self._open.has_news:
            return []
        moves = self._unbegun(now)
        if now - self._evened_at >= _EVEN_EVERY_S:
            gain = Gain(self._settings.deal_gain_s, self._settings.deal_gain_share)
            moves += self._even_out(now, gain)
            self._open.has_news = False
        return moves

    def even_out(self, now: float) -> list[Move]:
        """The moves that even out the queues, whoever came or not: only where much is won, for lengths differ, and so
        do the times that instances are predicted to take."""
        return self._even_out(now, Gain(self._settings.move_gain_s, self._settings.move_gain_share))

    def _even_out(self, now: float, gain: Gain) -> list[Move]:
        """The moves from the longest queue to the shortest, until they are even; none where that wins less."""
        self._evened_at = now
        self._open.refresh()
        if not self._open.free_slots():
            return []
        budget = self._budget(now)
        moves: list[Move] = []
        movable: dict[Instance, list[PlacedSample]] = {}
        predicted: set[Instance] = set()
        sources = self._by_length(self._placement.instances.values())
        while sources:
            _, number, source = heapq.heappop(sources)
            if not source.counted:
                continue
            target = self._open.best(next(reversed(source.counted.values())).min_version)
            if target is None or target is source or not target.has_free_slot:
                continue
            if source not in movable and not self._pays(source, target, gain):
                continue
            if stale := {source, target} - predicted:
                # What moves is predicted anew: beside older predictions it would seem to be less work where it goes.
                predicted |= stale
                for one in stale:
                    self._load.predict_anew(one)
                    self._open.enter(one)
                heapq.heappush(sources, (-self._load.left_s(source), number, source))
                continue
            if source not in movable:
                movable[source] = self._able_to_move(source, now)
            sample, is_cheap = self._take_movable(movable[source], source, target, dear=budget >= 1.0)
            if sample is None:
                continue
            budget -= not is_cheap
            self._moves_left -= not is_cheap
            moves.append(self._move(sample, source, target, now))
            heapq.heappush(sources, (-self._load.left_s(source), number, source))
        return moves

    def relieve_stragglers(self, now: float) -> list[Move]:
        """The moves of the long tail: few samples are left, some where it is much slower than on an idle instance."""
        self._open.refresh()
        instances = list(self._placement.instances.values())
        slots = sum(one.slots for one in instances if one.accepting)
        if (
            self._placement.queue
            or sum(len(one.counted) for one in instances) > self._settings.tail_share * slots
        ):
            return []
        speeds = [one.sample_tokens_s for one in instances if one.sample_tokens_s]
        if not speeds:
            return []
        typical = sum(speeds) / len(speeds)
        idle = sorted(
            (one for one in instances if one.has_free_slot and one.is_lightly_used),
            key=lambda one: (-(one.sample_tokens_s or typical), one.number),
        )
        slow = sorted(
            (
                (self._left_s(sample, source, typical), sample, source)
                for source in instances
                for sample in source.counted.values()
                if self._may_move(sample, source, now, cheap=False)
            ),
            key=lambda left: (-left[0], left[1].key),
        )
        budget = self._budget(now)
        moves: list[Move] = []
        at = 0
        for here_s, sample, source in slow:
            while at < len(idle) and not (idle[at].has_free_slot and idle[at].is_lightly_used):
                at += 1
            if at == len(idle) or len(moves) >= budget:
                break
            target = idle[at]
            there_s = self._left_elsewhere_s(sample, source, target, typical)
            if (
                target is not source
                and target.version >= sample.min_version
                and here_s > self._settings.straggler_factor * there_s
                and here_s - there_s > self._settings.move_gain_s
            ):
                moves.append(self._move(sample, source, target, now))
        self._moves_left -= len(moves)
        return moves

    def _unbegun(self, now: float) -> list[Move]:
        """The moves of samples that stand beyond their instances' slots, to whoever has a free one."""
        moves: list[Move] = []
        if not self._open.free_slots():
            return moves
        for source in self._open.crowded():
            beyond = len(source.counted) - source.max_running
            for sample in list(islice(reversed(source.counted.values()), beyond)):
                if not self._may_move(sample, source, now, cheap=True):
                    continue
                able = [one for one in self._open.free_slots() if one.accepts(sample)]
                if able:
                    target = min(able, key=lambda one: (self._load.left_s(one), one.number))
                    if self._router.keeps_prefix(sample, source, target):
                        continue
                    moves.append(self._move(sample, source, target, now))
        return moves

    def _by_length(self, instances: Iterable[Instance]) -> list[tuple[float, int, Instance]]:
        """A heap of those that have samples; the first takes longest."""
        found = [(-self._load.left_s(one), one.number, one) for one in instances if one.counted]
        heapq.heapify(found)
        return found

    def _budget(self, now: float) -> float:
        refilled = self._moves_left + (now - self._moves_at) * self._settings.moves_per_s
        self._moves_left = min(refilled, float(self._settings.moves_burst))
        self._moves_at = now
        return math.floor(self._moves_left)

    def _needed_gain_s(self, source: Instance) -> float:
        """What a move has to win that is not cheap."""
        share_s = self._settings.move_gain_share * self._load.left_s(source)
        return max(self._settings.move_gain_s, share_s) + self._router.backlog_s()

    def _may_move(self, sample: PlacedSample, source: Instance, now: float, *, cheap: bool) -> bool:
        if sample.stays or sample.recalled or sample.holder is not source:
            return False
        rested = now - sample.moved_at >= self._settings.move_cooldown_s
        return rested or (cheap and sample.moves < self._settings.cheap_moves)

    def _able_to_move(self, source: Instance, now: float) -> list[PlacedSample]:
        """Those of the source's samples that may move, the newest last."""
        return [
            sample for sample in source.counted.values() if self._may_move(sample, source, now, cheap=True)
        ]

    def _pays(self, source: Instance, target: Instance, gain: Gain) -> bool:
        """Whether the source is done so much sooner where it shares with the target that it is worth the moves. While
        samples queue, they even out the instances without any."""
        left_s = self._load.left_s
        now_s = left_s(source)
        least_s = max(gain.seconds, gain.share * now_s) + self._router.backlog_s()
        given, mean = len(source.counted), source.outstanding_tokens / len(source.counted)
        while given and now_s - left_s(target) > least_s:
            tokens = given * mean
            if left_s(target, more=given, more_tokens=tokens) < now_s - least_s:
                return now_s - left_s(source, more=-given, more_tokens=-tokens) > least_s
            given //= 2
        return False

    def _take_movable(
        self, able: list[PlacedSample], source: Instance, target: Instance, *, dear: bool
    ) -> tuple[PlacedSample | None, bool]:
        """Take one whose move pays, and say whether it is cheap; with `dear` also one that is not. The newest is looked
        at first: it most likely still waits in the engine, or has the least to redo."""
        prompts = self._placement.queue.groups
        before_s = self._load.left_s(source)
        dear_s = before_s - self._needed_gain_s(source)
        for at in range(len(able) - 1, max(len(able) - _CANDIDATES, 0) - 1, -1):
            sample = able[at]
            if target.version < sample.min_version:
                continue
            redone = source.done_tokens(sample)
            if target not in prompts[sample.group].prompt_at:
                redone += sample.prompt_tokens
            again = redone * self._settings.prefill_cost
            after_s = self._load.left_s(target, more=1, more_tokens=sample.expected + again)
            is_cheap = (
                again <= self._settings.cheap_share * sample.expected
                and sample.moves < self._settings.cheap_moves
            )
            if after_s < (before_s - self._settings.move_s if is_cheap else dear_s if dear else 0.0):
                return able.pop(at), is_cheap
        return None, False

    def _move(self, sample: PlacedSample, source: Instance, target: Instance, now: float) -> Move:
        self._placement.migrate(sample, target, now)
        self._open.enter(source)
        self._open.enter(target)
        return Move(sample, source, target)

    def _left_s(self, sample: PlacedSample, source: Instance, typical_speed: float) -> float:
        """How long the sample takes where it is, at the speed of one sample there."""
        left = self._load.lengths.expected_remaining(source.done_tokens(sample), sample.max_new_tokens)
        return left / (source.present_sample_tokens_s or typical_speed)

    def _left_elsewhere_s(
        self, sample: PlacedSample, source: Instance, target: Instance, typical_speed: float
    ) -> float:
        """How long it takes on a target with few samples, prefix recomputation included."""
        done = source.done_tokens(sample)
        left = self._load.lengths.expected_remaining(done, sample.max_new_tokens)
        redone = (sample.prompt_tokens + done) * self._settings.prefill_cost
        return left / (target.sample_tokens_s or typical_speed) + redone / target.rate_tokens_s
