"""Connections that are proven and that nobody uses now: a fetch begins with those of the one before.

To prove a token costs a millisecond of both ends, to agree on keys twenty, and a fetch of eight receivers would do
it seventy times.

Invariants:
- *at rest*: a line is kept when all that was asked over it has been answered, and taken while nothing has come since;
- *not for long, not many*: one that nobody took for `KEPT_S` is closed when the next is taken or kept, and so are
  the oldest of more than `KEPT_LINES`;
- *closed is closed*: after `close` none is kept.

This module must not know what is asked over them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from gyre.weights.transfer.protocol import PeerConnection

KEPT_S = 100.0
"""A little less than a source waits for a request (`gyre.weights.transfer.server.IDLE_S`), and longer than most
steps last."""

KEPT_LINES = 16
"""Of one receiver to all sources. What fetches need beyond them is dialled."""


class ConnectionPool:
    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = monotonic
        self._kept: list[tuple[float, str, PeerConnection]] = []
        """When each came, oldest first."""
        self._closed = False
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._kept)  # where an owner was dropped and not closed

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, address: str) -> PeerConnection | None:
        """The last one to there that is still good."""
        while True:
            with self._lock:
                late = self._expired()
                at = next(
                    (at for at in reversed(range(len(self._kept))) if self._kept[at][1] == address), None
                )
                line = self._kept.pop(at)[2] if at is not None else None
            _close(late)
            if line is None or line.is_at_rest():
                return line
            line.close()  # its source has ended, or has closed it

    def keep(self, address: str, line: PeerConnection) -> None:
        """The line is not the caller's any more."""
        line.abandoned = _never  # what asked belonged to a fetch, with all its memory
        with self._lock:
            late = self._expired()
            if self._closed:
                late.append(line)
            else:
                self._kept.append((self._now(), address, line))
                late += [line for _, _, line in self._kept[:-KEPT_LINES]]
                del self._kept[:-KEPT_LINES]
        _close(late)

    def close(self) -> None:
        """Safe to call twice. What is in use is closed when it comes back."""
        with self._lock:
            self._closed = True
            _close_all(self._kept)

    def _expired(self) -> list[PeerConnection]:
        """Under the lock: no longer kept."""
        since = self._now() - KEPT_S
        late = [line for kept, _, line in self._kept if kept <= since]
        del self._kept[: len(late)]
        return late


def _never() -> bool:
    return False


def _close_all(kept: list[tuple[float, str, PeerConnection]]) -> None:
    _close([line for _, _, line in kept])
    kept.clear()


def _close(lines: list[PeerConnection]) -> None:
    for line in lines:
        line.close()
