"""Who sends a chunk next: a few at a time, so that each is soon whole and can be passed on.

A link that carries eight chunks to eight receivers at once has made none of them whole until all eight are, and until
then none of the eight has anything to give to another. So chunks go a few at a time; who finds no turn is told so and
asks another source.

Invariants:
- *nobody waits for himself*: turns are between callers; a caller that is alone sends as much side by side as it asks;
- *no turn for who stands still*: a caller that takes no bytes gives its turn up, and goes on without one;
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


class Turn:
    """One chunk's. `let_go` once it is sent, or stands still; more than once does no harm."""

    def __init__(self, turns: Turns, caller: str) -> None:
        self._turns = turns
        self.caller = caller
        self.began = time.monotonic()

    def let_go(self, sent_bytes: int = 0) -> None:
        """`sent_bytes`, where all of the chunk went: what the link carries is learnt from it."""
        self._turns._let_go(self, sent_bytes)


class Turns:
    """`limit` is how many callers' chunks go side by side; it follows what the link carries."""

    def __init__(self) -> None:
        self.limit = LEAST
        self._active: list[Turn] = []
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._link_bytes_s: float | None = None

    def take(self, caller: str, wait_s: float = 0.0) -> Turn | None:
        """A turn, within `wait_s`; None where there is none."""
        until = time.monotonic() + wait_s
        with self._changed:
            if not self._waiting and self._may(caller):
                return self._grant(caller)
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
                return self._grant(caller)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _may(self, caller: str) -> bool:
        return len(self._active) < self.limit or all(turn.caller == caller for turn in self._active)

    def _grant(self, caller: str) -> Turn:
        turn = Turn(self, caller)
        self._active.append(turn)
        return turn

    def _let_go(self, turn: Turn, sent_bytes: int) -> None:
        with self._changed:
            if turn not in self._active:
                return
            beside = len(self._active)
            self._active.remove(turn)
            seconds = time.monotonic() - turn.began
            if sent_bytes and seconds > 0:
                found = sent_bytes / seconds * beside
                known = self._link_bytes_s
                self._link_bytes_s = found if known is None else 0.7 * known + 0.3 * found
                self.limit = max(LEAST, min(MOST, math.ceil(SOON_S * self._link_bytes_s / sent_bytes)))
            self._changed.notify_all()
