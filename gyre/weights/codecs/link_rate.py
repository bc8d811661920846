"""What a link carries, from transfers that share it: the bytes of all, by the time in which any of them was under way.

The rate of one transfer says little of a link that several share, and how many shared it while it lasted is not known
when it ends. A transfer that socket buffers hold, or a burst that a shaped link lets through, says nothing at all.

Invariants:
- *no second twice*: transfers side by side take their time together;
- *nothing from what a buffer holds*: transfers of less than `MEASURED_BYTES` do not count, whatever their number.

This module must not know what was transferred, and reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left

MEASURED_BYTES = 1 << 20
"""What has not to be split into less to be measured: chunks are no smaller, but of versions of less than this."""


class LinkRate:
    """Of the transfers of one fetch."""

    def __init__(self) -> None:
        self.count = 0
        self._nbytes = 0
        self._spans: list[tuple[float, float]] = []
        """When something was under way: disjoint, in order."""

    def add(self, start_s: float, end_s: float, nbytes: int) -> None:
        """A transfer that is over; one that is too small to say anything is not counted."""
        if nbytes < MEASURED_BYTES or end_s <= start_s:
            return
        self.count += 1
        self._nbytes += nbytes
        first = bisect_left(self._spans, start_s, key=lambda span: span[1])
        last = first
        while last < len(self._spans) and self._spans[last][0] <= end_s:
            start_s, end_s = min(start_s, self._spans[last][0]), max(end_s, self._spans[last][1])
            last += 1
        self._spans[first:last] = [(start_s, end_s)]

    def bytes_s(self) -> float | None:
        """None while nothing has counted."""
        return self._nbytes / sum(end - start for start, end in self._spans) if self._nbytes else None
