"""Upload slots: a source sends a few chunks at a time, so that each is soon whole and can be passed on.

If a link carries eight chunks to eight receivers at once, none of them is whole until all eight are, and until then no
receiver has anything to pass on. A receiver that finds no free slot is told so and asks another source.

Invariants:
- *nobody waits for himself*: slots are shared between callers; a caller that is alone gets every slot it asks for;
- *no slot for the slow*: a caller that takes no bytes, or takes much longer than the link needs for a chunk, loses its
  slot; its chunk goes on without one;
- *first come, first served*, among waiting callers.

This module must not know what is sent, or how.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque

LEAST, MOST = 2, 8
"""Bounds of the number of slots. One alone would leave the link idle between two chunks."""

SOON_S = 0.1
"""There are as many slots as the link can send chunks within this time."""

HELD_TIMES = 3.0
SHORTEST_S, LONGEST_S = 2.0, 10.0
"""A slot lapses after `HELD_TIMES` the expected time of its chunk, within these bounds; after the longest while the
link's rate is not known. One slow chunk does not tell whether the link or its receiver is slow, but the other chunks
do."""


class UploadSlot:
    """The slot of one chunk. `release` it when the chunk is sent; a second call does no harm. `lapse` gives it to
    others before that, while the rest of the chunk goes on."""

    def __init__(self, slots: UploadSlots, caller: str, nbytes: int) -> None:
        self._slots = slots
        self.caller = caller
        self.nbytes = nbytes
        self.began = time.monotonic()
        self.ended = False

    def release(self, sent_bytes: int = 0) -> None:
        """Give the slot back. `sent_bytes`, if all of the chunk was sent, measures the link."""
        self._slots._release(self, sent_bytes)

    def lapse(self) -> None:
        self._slots._lapse(self)

    def went_on(self) -> None:
        """Note that some of the chunk was sent; the slot lapses if it is too old."""
        if time.monotonic() - self.began > self._slots.held_s(self.nbytes):
            self.lapse()


class UploadSlots:
    """A source's upload slots. `limit` is their number, which follows the link's rate."""

    def __init__(self) -> None:
        self.limit = LEAST
        self._active: list[UploadSlot] = []
        self._sending = 0
        """Number of chunks being sent, including those whose slot lapsed."""
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._link_bytes_s: float | None = None

    def take(self, caller: str, wait_s: float = 0.0, nbytes: int = 0) -> UploadSlot | None:
        """A slot for a chunk of `nbytes`; None if none gets free within `wait_s`."""
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
        return len(self._active) < self.limit or all(slot.caller == caller for slot in self._active)

    def _grant(self, caller: str, nbytes: int) -> UploadSlot:
        slot = UploadSlot(self, caller, nbytes)
        self._active.append(slot)
        self._sending += 1
        return slot

    def held_s(self, nbytes: int) -> float:
        """How long a slot for a chunk of `nbytes` lasts."""
        rate = self._link_bytes_s
        if rate is None:
            return LONGEST_S
        return min(LONGEST_S, max(SHORTEST_S, HELD_TIMES * self.limit * nbytes / rate))

    def _lapse(self, slot: UploadSlot) -> None:
        with self._changed:
            if slot in self._active:
                self._active.remove(slot)
                self._changed.notify_all()

    def _release(self, slot: UploadSlot, sent_bytes: int) -> None:
        with self._changed:
            if slot.ended:
                return
            slot.ended = True
            # A chunk whose slot lapsed shared the link with all. To a chunk with a slot, lapsed ones hardly count.
            beside = len(self._active) if slot in self._active else self._sending
            self._sending -= 1
            if slot in self._active:
                self._active.remove(slot)
            seconds = time.monotonic() - slot.began
            if sent_bytes and seconds > 0:
                found = sent_bytes / seconds * beside
                known = self._link_bytes_s
                self._link_bytes_s = found if known is None else 0.7 * known + 0.3 * found
                self.limit = max(LEAST, min(MOST, math.ceil(SOON_S * self._link_bytes_s / sent_bytes)))
            self._changed.notify_all()
