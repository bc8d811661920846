"""Who sends a chunk next: a few at a time, so that each is soon whole and can be passed on.

A link that carries eight chunks to eight receivers at once has made none of them whole until all eight are, and until
then none of the eight has anything to give to another. So chunks go a few at a time; who finds no turn is told so and
asks another source.

Invariants:
- *nobody waits for himself*: turns are between callers; a caller that is alone sends as much side by side as it asks;
- *no turn for who stands still, or is slow*: a caller that takes no bytes, or much longer than the link needs for a
  chunk, gives its turn up and goes on without one;
- *first come, first served*, among those who wait.

This module must not know what is sent, or by which way.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque

LEAST, MOST = 2, 8
"""Turns at one time. One alone would leave the link idle between two chunks."""

SOON_S = 0.1
"""As many chunks are sent side by side as the link makes whole within this time."""


HELD_TIMES = 3.0
SHORTEST_S, LONGEST_S = 2.0, 10.0
"""A turn lapses after so many times what the chunk is expected to take, within these bounds; after the longest while
the link is not known. One slow chunk does not say whether the link or its receiver is slow; what others make of it
does."""


class UploadSlot:
    """One chunk's. `let_go` when its sending has ended; more than once does no harm. Until then `lapse` gives the turn
    to others, while the rest of the chunk goes on beside theirs."""

    def __init__(self, turns: UploadSlots, caller: str, nbytes: int) -> None:
        self._turns = turns
        self.caller = caller
        self.nbytes = nbytes
        self.began = time.monotonic()
        self.ended = False

    def let_go(self, sent_bytes: int = 0) -> None:
        """`sent_bytes`, where all of the chunk went: what the link carries is learnt from it."""
        self._turns._let_go(self, sent_bytes)

    def lapse(self) -> None:
        self._turns._lapse(self)

    def went_on(self) -> None:
        """Some of it was sent: the turn lapses where it is too old by now."""
        if time.monotonic() - self.began > self._turns.held_s(self.nbytes):
            self.lapse()


class UploadSlots:
    """`limit` is how many callers' chunks go side by side; it follows what the link carries."""

    def __init__(self) -> None:
        self.limit = LEAST
        self._active: list[UploadSlot] = []
        self._sending = 0
        """Chunks, those that go on without a turn too."""
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._link_bytes_s: float | None = None

    def take(self, caller: str, wait_s: float = 0.0, nbytes: int = 0) -> UploadSlot | None:
        """A turn for a chunk of `nbytes`, within `wait_s`; None where there is none."""
        until = time.monotonic() + wait_s
        with self._changed:
            if not self._waiting and self._may(caller):
                return self._grant(caller, nbytes)
            if wait_s <= 0:
                return None
            ticket = object()
            self._waiting.append(ticket)
            try:
                while not (self._waiting[0] is ticket and self._may(caller)):
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        return None
                    self._changed.wait(left_s)
                return self._grant(caller, nbytes)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _may(self, caller: str) -> bool:
        return len(self._active) < self.limit or all(turn.caller == caller for turn in self._active)

    def _grant(self, caller: str, nbytes: int) -> UploadSlot:
        turn = UploadSlot(self, caller, nbytes)
        self._active.append(turn)
        self._sending += 1
        return turn

    def held_s(self, nbytes: int) -> float:
        """How long a turn for so many bytes lasts."""
        rate = self._link_bytes_s
        if rate is None:
            return LONGEST_S
        return min(LONGEST_S, max(SHORTEST_S, HELD_TIMES * self.limit * nbytes / rate))

    def _lapse(self, turn: UploadSlot) -> None:
        with self._changed:
            if turn in self._active:
                self._active.remove(turn)
                self._changed.notify_all()

    def _let_go(self, turn: UploadSlot, sent_bytes: int) -> None:
        with self._changed:
            if turn.ended:
                return
            turn.ended = True
            # Who lapsed shared the link with all; of the others those who lapsed have the least.
            beside = len(self._active) if turn in self._active else self._sending
            self._sending -= 1
            if turn in self._active:
                self._active.remove(turn)
            seconds = time.monotonic() - turn.began
            if sent_bytes and seconds > 0:
                found = sent_bytes / seconds * beside
                known = self._link_bytes_s
                self._link_bytes_s = found if known is None else 0.7 * known + 0.3 * found
                self.limit = max(LEAST, min(MOST, math.ceil(SOON_S * self._link_bytes_s / sent_bytes)))
            self._changed.notify_all()
