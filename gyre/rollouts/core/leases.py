"""How far samples were when their leases ended: what a former holder has beyond that is known to be lost.

Leases are numbered one after another, so a lease's number names its slot in a table of fixed size. It is made once: a
manager ends a thousand leases a second, and what grew and shrank with them would leave holes in its memory.

Invariant *the last ones*: a lease that ended is known until one that is `SLOTS` numbers from it ends, or it is taken.

This module must not know why a lease ended.
"""

from __future__ import annotations

from array import array

SLOTS = 1 << 17
"""12 bytes each: a former holder is away for seconds, and a manager gives out some thousand leases a second."""


class EndedLeases:
    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._leases = array("Q", bytes(8 * slots))
        self._lengths = array("I", bytes(4 * slots))

    def note(self, lease: int, length: int) -> None:
        """It ended, and the book knows of `length` tokens of the sample."""
        slot = lease % self._slots
        self._leases[slot] = lease
        self._lengths[slot] = length

    def take(self, lease: int) -> int | None:
        """What was noted of it, once; None where nothing is known, or not any more."""
        slot = lease % self._slots
        if not lease or self._leases[slot] != lease:
            return None
        self._leases[slot] = 0
        return self._lengths[slot]
