"""The accepting side of a port: it takes callers in, bounds those who have not shown a token, and outlives the
process's last descriptor.

asyncio's own accept loop goes on accepting with descriptors spent, and writes a traceback for each try.

Invariants:
- *an honest caller comes in*: whoever is slow to show a token makes room, the oldest first (`Unproven`);
- *the process keeps a reserve*: a caller whose descriptor is within the reserve of the process is not kept;
- *spent is not the end*: without a descriptor the port pauses, closes the oldest callers, and comes back.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from gyre.clock import Clock
from gyre.ports.bounds import PortBounds, highest_descriptor
from gyre.ports.http_gate import HttpGate, KnowsTokens

AT_ONCE = 32
"""Callers taken in before the loop's other work has its turn."""

PAUSE_S = 0.2
"""After an accept without a descriptor, or one within the reserve. Callers wait in the kernel's queue meanwhile."""

FREED_AT_ONCE = 16
"""Callers closed when descriptors are spent: one place alone would be taken by the next caller."""

_SPENT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)


def bind(host: str, port: int, *, backlog: int = 256) -> list[socket.socket]:
    """Sockets that listen on all addresses of `host`. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            made.append(listener := socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(backlog)
    except OSError:
        for listener in made:
            listener.close()
        raise
    return made


class _Caller:
    """One connection, from its accept on; one of `unproven` until it has shown a token."""

    def __init__(self, link: socket.socket, unproven: Unproven[_Caller]) -> None:
        self.link = link
        self._unproven = unproven
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.BaseTransport | None = None

    def end(self) -> None:
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def proven(self) -> None:
        self._unproven.discard(self)

    def gone(self) -> None:
        self._unproven.discard(self)


class Listener:
    """Accepts on sockets that listen, from `start` until `close`; it owns them. `make` returns the server's own
    protocol for a connection; the other arguments are the gate's (`HttpGate`)."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make: Callable[[], asyncio.Protocol],
        bounds: PortBounds,
        *,
        tls: ssl.SSLContext | None = None,
        tokens: KnowsTokens | None = None,
        websockets: frozenset[str] = frozenset(),
    ) -> None:
        self._sockets = list(sockets)
        self._make = make
        self._bounds = bounds
        self._tls = tls
        self._tokens = tokens
        self._websockets = websockets
        self._unproven: Unproven[_Caller] = Unproven(bounds.unproven, bounds.unproven_per_address)
        self._welcoming: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._closed = False
        make_sparse(__name__, "asyncio", "uvicorn.error", "aiohttp.server", "aiohttp.web")

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for listener in self._sockets:
            listener.setblocking(False)
        self._resume()

    @property
    def unproven(self) -> int:
        """How many callers have not shown a token."""
        return len(self._unproven)

    def close(self) -> None:
        """Accept no more. Connections stay. Harmless when it was closed before."""
        if self._closed:
            return
        self._closed = True
        if self._resuming is not None:
            self._resuming.cancel()
        for listener in self._sockets:
            self._loop.remove_reader(listener)
            listener.close()
        for task in self._welcoming:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._welcoming, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------

    def _resume(self) -> None:
        self._resuming = None
        for listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def _pause(self, why: object) -> None:
        """Accept nobody for a moment, and make room."""
        for listener in self._sockets:
            self._loop.remove_reader(listener)
        if self._resuming is None:
            self._resuming = self._loop.call_later(PAUSE_S, self._resume)
        for _ in range(FREED_AT_ONCE):
            if (oldest := self._unproven.oldest()) is None:
                break
            oldest.end()
        _log.warning(
            "No descriptor is left for a caller: %s. Raise the limit on open files (ulimit -n).", why
        )

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                link, peer = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _SPENT:
                    self._pause(error)
                    return
                continue  # this caller has gone already
            if link.fileno() > highest_descriptor(self._bounds.reserve_descriptors):
                link.close()
                self._pause("the rest is the process's own reserve")
                return
            self._take_in(link, str(peer[0]))

    def _take_in(self, link: socket.socket, address: str) -> None:
        caller = _Caller(link, self._unproven)
        for crowded_out in self._unproven.add(caller, address):
            crowded_out.end()
        caller.task = task = self._loop.create_task(self._welcome(caller))
        self._welcoming.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._welcoming.discard(task)
            if task.cancelled():  # also where it had not begun
                caller.gone()
                link.close()

        task.add_done_callback(done)

    async def _welcome(self, caller: _Caller) -> None:
        def gate() -> HttpGate:
            return HttpGate(
                self._make(),
                self._bounds,
                caller,
                tokens=self._tokens,
                websockets=self._websockets,
            )

        try:
            caller.transport, _ = await self._loop.connect_accepted_socket(
                gate,
                caller.link,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._bounds.handshake_s,
            )
        except OSError:  # no handshake, or it has gone
            caller.gone()
            caller.link.close()


EVERY_S = 1.0
CAUSES_KNOWN = 256
"""Causes kept at one time; the one that was silent for the longest is forgotten first."""


class SparseLog(logging.Filter):
    """Two records have one cause if their logger, their text before its values are filled in and the type of their
    exception are the same."""

    def __init__(self, every_s: float = EVERY_S, clock: Clock = time) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._causes: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        cause = (record.name, str(record.msg)[:80], error)
        now = self._clock.monotonic()
        since, left_out = self._causes.pop(cause, (float("-inf"), 0))
        if now - since < self._every_s:
            self._causes[cause] = (since, left_out + 1)
            return False
        self._causes[cause] = (now, 0)
        while len(self._causes) > CAUSES_KNOWN:
            self._causes.popitem(last=False)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (… and {left_out:,} more)", None
        return True


_FILTER = SparseLog()


def make_sparse(*names: str) -> None:
    """Have these loggers write one line a second at most for one cause. Harmless where it was done before."""
    for name in names:
        logging.getLogger(name).addFilter(_FILTER)


Caller = TypeVar("Caller", bound=Hashable)


class Unproven(Generic[Caller]):
    """The callers who have not shown a token yet, and which of them make room for the next: pure.

    Invariant *a newcomer has a place*: a new caller is always taken in. If there are too many, the oldest caller of the
    address with the most makes room: a crowd at one address harms no caller at another.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = max(1, most)
        self._most_per_address = max(1, most_per_address)
        self._by_address: dict[str, OrderedDict[Caller, None]] = {}
        self._address_of: dict[Caller, str] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._address_of

    def add(self, caller: Caller, address: str) -> list[Caller]:
        """Take a caller in. Returns those who make room, and who are no longer counted."""
        out: list[Caller] = []
        here = self._by_address.get(address)
        if here is not None and len(here) >= self._most_per_address:
            out.append(self._remove_oldest(address))
        elif len(self) >= self._most and (evicted := self.oldest()) is not None:
            out.append(evicted)
        self._by_address.setdefault(address, OrderedDict())[caller] = None
        self._address_of[caller] = address
        return out

    def oldest(self) -> Caller | None:
        """Remove and return the oldest caller of the address with the most; None if there is none."""
        if not self._by_address:
            return None
        return self._remove_oldest(max(self._by_address, key=lambda one: len(self._by_address[one])))

    def discard(self, caller: Caller) -> None:
        """The caller has shown its token, or has gone."""
        address = self._address_of.pop(caller, None)
        if address is not None:
            self._drop(address, caller)

    def _remove_oldest(self, address: str) -> Caller:
        caller = next(iter(self._by_address[address]))
        self._drop(address, caller)
        del self._address_of[caller]
        return caller

    def _drop(self, address: str, caller: Caller) -> None:
        here = self._by_address[address]
        del here[caller]
        if not here:
            del self._by_address[address]
