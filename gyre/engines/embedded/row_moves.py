"""Moves of slots' keys and values, collected and then made at once.

Requests that are admitted or end together move tens of slots, and each small copy costs as much as one large.

Invariants:
- *as one after another*: collected moves have the effect that they would have singly, in their order;
- *no NaN behind a request*: a slot is zero beyond what its request holds: broken weights may have left NaN there, which
  no mask hides.
"""

from __future__ import annotations

from gyre.engines.embedded.served_model import Slots


class RowMoves:
    def __init__(self, slots: int) -> None:
        self.written = [0] * slots
        """For each slot, up to where it may hold anything but zeros."""
        self._moves: dict[int, tuple[int, int]] = {}
        """For each target the slot that its content comes from, as it is in the cache now, and how much of it."""

    def wrote(self, slot: int, end: int) -> None:
        """A request has filled the slot up to position `end`."""
        self.written[slot] = max(self.written[slot], end)

    def move(self, source: int, target: int, length: int) -> None:
        """Slot `target` gets the first `length` positions of `source`, and nothing else."""
        root, _ = self._moves.get(source, (source, length))
        self._moves[target] = (root, length)

    def apply(self, cache: Slots) -> None:
        """Make the moves that were collected."""
        moves, self._moves = self._moves, {}
        due = {
            target: (root, length)
            for target, (root, length) in moves.items()
            if root != target or self.written[target] > length
        }
        if due:
            ends = {target: max(length, self.written[target]) for target, (_, length) in due.items()}
            cache.rearrange(
                list(due),
                [root for root, _ in due.values()],
                [kept for _, kept in due.values()],
                max(ends.values()),
            )
            for target, (_, length) in due.items():
                self.written[target] = length
