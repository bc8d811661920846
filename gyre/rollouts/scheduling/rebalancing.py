"""Which samples migrate when instances come, go or slow down.

The ancestor's Algorithm 2 (RLBoost, arXiv 2510.19225) with the gain of each move predicted, prefix recomputation
included.

Invariants:
- *no ping-pong*: a move shortens the longer of two queues by more than a margin, and the sample then stays for a while;
- *bounded*: moves are limited at once and over time;
- *its own policies*: a sample moves to no instance whose policy version is older than the sample accepts;
- *trials stay*: a sample that is being tried where it is, or was told to go already, does not move.

This module must not know engines, sockets or the clock: `now` is an argument.
"""

from __future__ import annotations

import heapq
import math
from itertools import islice
from typing import NamedTuple

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.placement import Placement
from gyre.rollouts.scheduling.router import OpenInstances, Router

CANDIDATES = 32
"""How many of a source's samples are looked at for one that may move."""


class Move(NamedTuple):
    """The source is to stop `sample`, so that it goes on at the target, in whose load it counts already."""

    sample: PlacedSample
    source: Instance
    target: Instance


class Rebalancing:
    """Decisions over a placement. Each move is entered there at once, since the next one builds on it."""

    def __init__(self, placement: Placement, open_instances: OpenInstances, router: Router) -> None:
        self._placement = placement
        self._settings = placement.settings
        self._open = open_instances
        self._router = router
        self._moves_left = float(self._settings.moves_burst)
        self._moves_at = -math.inf

    def even_out(self, now: float) -> list[Move]:
        """The moves that even out the queues, from the longest to the shortest."""
        self._open.refresh()
        budget = self._budget(now)
        moves: list[Move] = []
        sources = [
            (-one.drain_s, one.number, one) for one in self._placement.instances.values() if one.counted
        ]
        heapq.heapify(sources)
        while sources and len(moves) < budget:
            target = self._open.best()
            if target is None:
                break
            _, number, source = heapq.heappop(sources)
            if source.drain_s - target.drain_s <= self._needed_gain_s(source):
                break
            sample = None if source is target else self._movable(source, target, now)
            if sample is None:
                continue
            moves.append(self._move(sample, source, target, now))
            heapq.heappush(sources, (-source.drain_s, number, source))
            self._open.enter(source)
            self._open.enter(target)
        self._moves_left -= len(moves)
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
            (one for one in instances if one.has_room and one.is_lightly_used),
            key=lambda one: (-(one.sample_tokens_s or typical), one.number),
        )
        slow = sorted(
            (
                (self._left_s(sample, source, typical), sample, source)
                for source in instances
                for sample in source.counted.values()
                if self._may_move(sample, now)
            ),
            key=lambda left: (-left[0], left[1].key),
        )
        budget = self._budget(now)
        moves: list[Move] = []
        at = 0
        for here_s, sample, source in slow:
            while at < len(idle) and not (idle[at].has_room and idle[at].is_lightly_used):
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

    def _budget(self, now: float) -> float:
        refilled = self._moves_left + (now - self._moves_at) * self._settings.moves_per_s
        self._moves_left = min(refilled, float(self._settings.moves_burst))
        self._moves_at = now
        return math.floor(self._moves_left)

    def _needed_gain_s(self, source: Instance) -> float:
        share_s = self._settings.move_gain_share * source.drain_s
        return max(self._settings.move_gain_s, share_s) + self._router.backlog_s()

    def _may_move(self, sample: PlacedSample, now: float) -> bool:
        if sample.stays or sample.recalled:
            return False
        return now - sample.moved_at >= self._settings.move_cooldown_s

    def _movable(self, source: Instance, target: Instance, now: float) -> PlacedSample | None:
        """A sample whose move pays. The newest is looked at first: it most likely still waits in the engine, or has
        the least to redo."""
        limit_s = source.drain_s - self._needed_gain_s(source) - target.drain_s
        for sample in islice(reversed(source.counted.values()), CANDIDATES):
            if not self._may_move(sample, now) or target.version < sample.min_version:
                continue
            redone = source.done_tokens(sample)
            if target not in self._placement.queue.groups[sample.group].prompt_at:
                redone += sample.prompt_tokens
            if (sample.expected + redone * self._settings.prefill_cost) / target.rate_tokens_s < limit_s:
                return sample
        return None

    def _move(self, sample: PlacedSample, source: Instance, target: Instance, now: float) -> Move:
        self._placement.migrate(sample, target, now)
        return Move(sample, source, target)

    def _left_s(self, sample: PlacedSample, source: Instance, typical_speed: float) -> float:
        """How long the sample takes where it is, at the speed of one sample there."""
        lengths = self._placement.load.lengths
        left = lengths.expected_remaining(source.done_tokens(sample), sample.max_new_tokens)
        return left / (source.present_sample_tokens_s or typical_speed)

    def _left_elsewhere_s(
        self, sample: PlacedSample, source: Instance, target: Instance, typical_speed: float
    ) -> float:
        """How long it takes on a target with few samples, prefix recomputation included."""
        done = source.done_tokens(sample)
        left = self._placement.load.lengths.expected_remaining(done, sample.max_new_tokens)
        redone = (sample.prompt_tokens + done) * self._settings.prefill_cost
        return left / (target.sample_tokens_s or typical_speed) + redone / target.rate_tokens_s
