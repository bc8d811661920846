"""When a failed call is tried again: after a pause that doubles.

The budget of retries is the master's to count. The pause is there so that a call that fails at once is not repeated a
thousand times a second while the master is away.

This module must not know what is tried.
"""

from __future__ import annotations

from collections.abc import Hashable

RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0


def pause_s(failures: int) -> float:
    """The pause after so many failures in a row, at least one."""
    return min(RETRY_MAX_S, RETRY_FIRST_S * float(2 ** min(failures - 1, 16)))


class Retries:
    """The pauses of many things, each under its key. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._failures: dict[Hashable, int] = {}
        self._not_before: dict[Hashable, float] = {}

    def failed(self, key: Hashable, now: float) -> int:
        """Returns how often in a row it has failed."""
        self._failures[key] = self._failures.get(key, 0) + 1
        self._not_before[key] = now + pause_s(self._failures[key])
        return self._failures[key]

    def succeeded(self, key: Hashable) -> None:
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def may(self, key: Hashable, now: float) -> bool:
        return now >= self._not_before.get(key, 0.0)
