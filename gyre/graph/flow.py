"""A graph in execution: which operators may fire, given what has fired.

Firing `i` of an operator takes tokens `i*consume … (i+1)*consume - 1` of every edge into it, so a firing is
named by its operator and index alone, wherever and however often it is run. That makes a run repeatable: the
same firing always has the same groups.

Invariants:
- *inputs are there*: firing `i` is enabled only when every edge into it holds its tokens;
- *outputs have room*: and only when no edge out of it would hold more than its capacity;
- *once*: an index is enabled, running or done, never two of them, and done only once.

The edges themselves hold nothing: what lies on them follows from which firings are done.

This module must not know what an operator does, where it runs, or what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre.graph.dataflow import Imbalance, repetition_vector
from gyre.graph.elements import Dcg, Edge, EdgeKind, Operator


@dataclass(frozen=True, slots=True)
class Firing:
    """`groups` are the ids of the groups that it takes; empty where no samples flow in."""

    operator: str
    index: int
    groups: tuple[int, ...] = ()


@dataclass(slots=True)
class _Track:
    """State of an operator's firings: all below `watermark` are done, and those in `beyond`."""

    total: int
    watermark: int = 0
    beyond: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)

    def is_done(self, index: int) -> bool:
        return index < self.watermark or index in self.beyond

    @property
    def count(self) -> int:
        """Number of firings that are done."""
        return self.watermark + len(self.beyond)

    def complete(self, index: int) -> None:
        self.beyond.add(index)
        while self.watermark in self.beyond:
            self.beyond.remove(self.watermark)
            self.watermark += 1

    def undo(self, index: int) -> None:
        if index < self.watermark:
            self.beyond.update(range(index + 1, self.watermark))
            self.watermark = index
        self.beyond.discard(index)


class Flow:
    """The execution of `dcg` for `count` firings of the operator `pace`."""

    def __init__(self, dcg: Dcg, *, pace: str, count: int) -> None:
        self.dcg = dcg
        self.pace = pace
        self._operators = {operator.ref: operator for operator in dcg.operators}
        self._into = {ref: dcg.into(ref) for ref in self._operators}
        self._out = {ref: dcg.out_of(ref) for ref in self._operators}
        totals = _totals(dcg, pace, count)
        self._tracks = {ref: _Track(totals[ref]) for ref in self._operators}

    # -- reading ------------------------------------------------------------------------------------

    def enabled(self) -> list[Firing]:
        """Every firing that may start now: operators nearest the pace first, lowest index first."""
        found = []
        for operator in self._operators.values():
            track = self._tracks[operator.ref]
            if operator.ordered:
                if (
                    not track.running
                    and track.watermark < track.total
                    and self._may(operator, track.watermark)
                ):
                    found.append(self.firing(operator.ref, track.watermark))
                continue
            # Room and licence end at one index each; what is done or running is passed over before it is looked at.
            for index in range(track.watermark, min(track.total, self._limit(operator))):
                if index in track.beyond or index in track.running:
                    continue
                if self._is_fed(operator, index):
                    found.append(self.firing(operator.ref, index))
        return found

    def firing(self, ref: str, index: int) -> Firing:
        for edge in (*self._into[ref], *self._out[ref]):
            if edge.kind is EdgeKind.SAMPLES:
                rate = edge.consume if edge.target == ref else edge.produce
                return Firing(ref, index, tuple(range(index * rate, (index + 1) * rate)))
        return Firing(ref, index)

    def is_done(self, ref: str, index: int) -> bool:
        return self._tracks[ref].is_done(index)

    def total(self, ref: str) -> int:
        return self._tracks[ref].total

    def running(self, ref: str) -> frozenset[int]:
        return frozenset(self._tracks[ref].running)

    @property
    def finished(self) -> bool:
        return all(track.watermark >= track.total for track in self._tracks.values())

    def next_index(self, ref: str) -> int | None:
        """The first firing that is neither done nor running; None if there is none."""
        track = self._tracks[ref]
        for index in range(track.watermark, track.total):
            if index not in track.beyond and index not in track.running:
                return index
        return None

    def blockers(self, ref: str, index: int) -> list[tuple[str, int]]:
        """The firings that have to end before this one may start: those that feed it, else those that make room for
        what it would put on a full edge. None if it may start."""
        found = [
            (edge.source, at)
            for edge in self._into[ref]
            if not self._edge_feeds(edge, index)
            for at in self._feeding(edge, index)
        ]
        if found:
            return found
        for edge in self._out[ref]:
            if not self._edge_has_room(edge, index):
                target = self._tracks[edge.target]
                return [(edge.target, at) for at in sorted(target.running) or [target.watermark]]
        return []

    def _feeding(self, edge: Edge, index: int) -> Iterable[int]:
        """The firings of the edge's source that are not done and have to be."""
        source, last = self._tracks[edge.source], (index + 1) * edge.consume - 1
        if edge.kind is EdgeKind.SAMPLES:
            needed = range(index * edge.consume // edge.produce, last // edge.produce + 1)
        else:
            needed = range(source.watermark, (last - edge.initial_tokens) // edge.produce + 1)
        return (at for at in needed if not source.is_done(at))

    # -- changing -----------------------------------------------------------------------------------

    def start(self, firing: Firing) -> None:
        track = self._tracks[firing.operator]
        if track.is_done(firing.index) or firing.index in track.running:
            raise ValueError(f"firing {firing.index} of {firing.operator} is already running or done")
        track.running.add(firing.index)

    def complete(self, firing: Firing) -> None:
        track = self._tracks[firing.operator]
        track.running.remove(firing.index)
        track.complete(firing.index)

    def cancel(self, firing: Firing) -> None:
        """Take back the start of a firing that failed; it may be started again."""
        self._tracks[firing.operator].running.discard(firing.index)

    def undo(self, ref: str, index: int) -> None:
        """Take back a firing that is done: its result is not wanted, and it is to be made again."""
        self._tracks[ref].undo(index)

    def mark_done(self, ref: str, indices: Iterable[int]) -> None:
        """Note firings that a ledger shows as done."""
        track = self._tracks[ref]
        for index in indices:
            if not track.is_done(index):
                track.complete(index)

    def rewind(self, ref: str, watermark: int) -> None:
        """Forget the firings from `watermark` on: their effect was lost with the vertex that held it."""
        track = self._tracks[ref]
        track.watermark = min(track.watermark, watermark)
        track.beyond = {index for index in track.beyond if index < watermark}
        track.running = {index for index in track.running if index < watermark}

    # -- the firing rule ----------------------------------------------------------------------------

    def _may(self, operator: Operator, index: int) -> bool:
        return (
            self._has_room(operator, index)
            and self._is_licensed(operator, index)
            and self._is_fed(operator, index)
        )

    def _limit(self, operator: Operator) -> int:
        """The first index without room or licence; all below it have both."""
        limits = [self._room_limit(edge) for edge in self._out[operator.ref]]
        limits += [
            (edge.initial_tokens + self._tracks[edge.source].watermark * edge.produce) // edge.consume
            for edge in self._into[operator.ref]
            if edge.kind is not EdgeKind.SAMPLES
        ]
        return min(limits, default=self._tracks[operator.ref].total)

    def _has_room(self, operator: Operator, index: int) -> bool:
        return all(self._edge_has_room(edge, index) for edge in self._out[operator.ref])

    def _is_licensed(self, operator: Operator, index: int) -> bool:
        """The counted inputs: weights and control."""
        edges = self._into[operator.ref]
        return all(self._edge_feeds(edge, index) for edge in edges if edge.kind is not EdgeKind.SAMPLES)

    def _is_fed(self, operator: Operator, index: int) -> bool:
        edges = self._into[operator.ref]
        return all(self._edge_feeds(edge, index) for edge in edges if edge.kind is EdgeKind.SAMPLES)

    def _edge_feeds(self, edge: Edge, index: int) -> bool:
        source = self._tracks[edge.source]
        first, last = index * edge.consume, (index + 1) * edge.consume - 1
        if edge.kind is EdgeKind.SAMPLES:
            return all(source.is_done(at) for at in range(first // edge.produce, last // edge.produce + 1))
        return last < edge.initial_tokens + source.watermark * edge.produce

    def _edge_has_room(self, edge: Edge, index: int) -> bool:
        return index < self._room_limit(edge)

    def _room_limit(self, edge: Edge) -> int:
        """The first firing of the edge's source that would put more on it than it holds."""
        target = self._tracks[edge.target]
        capacity = edge.capacity
        if capacity is None:
            if edge.kind is not EdgeKind.CONTROL:
                return self._tracks[edge.source].total
            # A go-ahead belongs to one firing of its target; the go-aheads of the next firing wait for their turn.
            capacity = edge.consume
        # Samples are taken in any order: one that is late takes the room of one, not of all behind it.
        taken = target.count if edge.kind is EdgeKind.SAMPLES else target.watermark
        return (taken * edge.consume + capacity) // edge.produce


def _totals(dcg: Dcg, pace: str, count: int) -> dict[str, int]:
    """Returns how often each operator fires in all. Operators that feed the pace fire in proportion to it, the others
    as often as they are fed."""
    refs = [operator.ref for operator in dcg.operators]
    rates = repetition_vector(refs, dcg.edges)
    if isinstance(rates, Imbalance):
        raise ValueError(f"the rates of {rates.edge} do not balance; compile_job refuses such a graph")
    upstream = {pace}
    grew = True
    while grew:
        grew = False
        for edge in dcg.edges:
            if edge.target in upstream and edge.source not in upstream:
                upstream.add(edge.source)
                grew = True
    totals = {ref: count * rates[ref] // rates[pace] for ref in refs if ref in upstream}
    pending = [ref for ref in refs if ref not in upstream]
    while pending:
        ready = [ref for ref in pending if all(edge.source in totals for edge in dcg.into(ref))]
        if not ready:
            raise ValueError(f"{', '.join(pending)} are fed only by each other")
        for ref in ready:
            totals[ref] = min(
                (edge.initial_tokens + totals[edge.source] * edge.produce) // edge.consume
                for edge in dcg.into(ref)
            )
        pending = [ref for ref in pending if ref not in ready]
    return totals
