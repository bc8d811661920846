"""A pool of authenticated idle connections: a fetch begins with those of the one before.

Proving the token costs both ends a millisecond, a TLS handshake a few more, and a fetch of eight receivers would do so
seventy times.

Invariants:
- *at rest*: a connection is kept when all that was asked over it has been answered, and taken only if nothing has come
  since;
- *not for long, not many*: a connection that nobody took for `KEPT_S` is closed when the next is taken or kept, and so
  are the oldest of more than `KEPT_CONNECTIONS`;
- *closed is closed*: after `close` none is kept.

This module must not know what is asked over them.
"""

from __future__ import annotations

import threading
import time
import weakref

from gyre.clock import Clock
from gyre.weights.transfer.protocol import PeerConnection

KEPT_S = 100.0
"""A little less than a source waits for a request (`gyre.weights.transfer.server.IDLE_S`), and longer than most
steps last."""

KEPT_CONNECTIONS = 16
"""Of one receiver to all sources. What fetches need beyond them is dialled."""


class ConnectionPool:
    def __init__(self, *, clock: Clock = time) -> None:
        self._clock = clock
        self._kept: list[tuple[float, str, PeerConnection]] = []
        """When each connection came, its address, and the connection; oldest first."""
        self._closed = False
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._kept)  # where an owner was dropped and not closed

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, address: str) -> PeerConnection | None:
        """The connection to `address` that was kept last and is still good; None if there is none."""
        while True:
            with self._lock:
                late = self._expired()
                at = next(
                    (at for at in reversed(range(len(self._kept))) if self._kept[at][1] == address), None
                )
                connection = self._kept.pop(at)[2] if at is not None else None
            _close(late)
            if connection is None or connection.is_at_rest():
                return connection
            connection.close()  # its source has ended, or has closed it

    def keep(self, address: str, connection: PeerConnection) -> None:
        """Keep a connection, which is not the caller's any more."""
        connection.abandoned = _never  # what asked belonged to a fetch, with all its memory
        with self._lock:
            late = self._expired()
            if self._closed:
                late.append(connection)
            else:
                self._kept.append((self._clock.monotonic(), address, connection))
                late += [connection for _, _, connection in self._kept[:-KEPT_CONNECTIONS]]
                del self._kept[:-KEPT_CONNECTIONS]
        _close(late)

    def close(self) -> None:
        """Safe to call twice. What is in use is closed when it comes back."""
        with self._lock:
            self._closed = True
            _close_all(self._kept)

    def _expired(self) -> list[PeerConnection]:
        """Under the lock: no longer kept."""
        since = self._clock.monotonic() - KEPT_S
        late = [connection for kept, _, connection in self._kept if kept <= since]
        del self._kept[: len(late)]
        return late


def _never() -> bool:
    return False


def _close_all(kept: list[tuple[float, str, PeerConnection]]) -> None:
    _close([connection for _, _, connection in kept])
    kept.clear()


def _close(pool: list[PeerConnection]) -> None:
    for connection in pool:
        connection.close()
