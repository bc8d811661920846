"""What one connection sends, watched before the server behind it hears of it.

The gate parses HTTP by itself, so it holds for any server, and the server gets no byte of a request that was refused.

Invariants:
- *every request has an end*: its head, its body and the reading of its answer have deadlines; an answer that is read,
  such as a stream of events, may take as long as it likes;
- *nothing is kept that is too large*: a head or a body above its bound ends the connection before the server reads on.

This module must not know routes, tokens or jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
from typing import NamedTuple, Protocol, cast

import httptools

from gyre.ports.bounds import PortBounds

LINGER_S = 1.0
"""How long a refused peer may take to read why, before the connection is cut."""

_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    413: "Content Too Large",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
}


class _Part(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    """The request is whole; the server's turn, or nothing happens until the next request."""
    OPEN = enum.auto()
    """It became a WebSocket, of a caller who showed a token: it has deadlines of its own."""
    REFUSED = enum.auto()


class Credentials(NamedTuple):
    """The values of a request's first headers with credentials; b"" where there is none."""

    authorization: bytes = b""
    cookie: bytes = b""


class KnowsTokens(Protocol):
    def is_proven(self, shown: Credentials) -> bool:
        """Whether they show a token that is good now."""


class HearsOfCaller(Protocol):
    """Whom the port counts as unproven, from its accept on."""

    def proven(self) -> None:
        """It has shown a token, or sent a whole request where none is needed. More than once."""

    def gone(self) -> None:
        """Its connection has ended."""


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class HttpGate(asyncio.Protocol):
    """Stands between a transport and the server's own protocol, `inner`.

    Without `tokens` a caller is proven by a whole request. `websockets` are the paths that become WebSockets.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        bounds: PortBounds,
        caller: HearsOfCaller,
        *,
        tokens: KnowsTokens | None = None,
        websockets: frozenset[str] = frozenset(),
    ) -> None:
        self._inner = inner
        self._bounds = bounds
        self._caller = caller
        self._tokens = tokens
        self._websockets = websockets
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._part = _Part.HEAD
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_until = 0.0
        self._url = b""
        self._credentials = Credentials()
        self._length = self._body = self._head = 0
        self._limit = bounds.body_bytes
        self._shown = False
        """Whether the last whole head shows a token, where one is needed."""
        self._fed = 0
        """Bytes since the last whole request, where no head is whole."""
        self._deaf = False
        """What comes after a request that asked for another protocol, which it does not get, is not read."""

    # -- the transport ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._arm(self._bounds.head_s, 408, "The request's head did not come in time.")
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        self._disarm_write()
        self._caller.gone()
        self._inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        if self._part is _Part.REFUSED:
            return None
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._part is not _Part.OPEN:
            self._disarm_write()
            self._write_timer = self._loop.call_later(self._bounds.write_stall_s, self._cut)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._disarm_write()
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._part is _Part.REFUSED or self._deaf:
            return
        if self._part is _Part.OPEN:
            self._inner.data_received(data)
            return
        try:
            self._parse(data)
        except _Refused as refusal:
            self._refuse(refusal.status, str(refusal))
            return
        self._inner.data_received(data)

    # -- what the parser calls -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._part is not _Part.HEAD:
            self._arm(self._bounds.head_s, 408, "The request's head did not come in time.")
        self._part = _Part.HEAD
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if name.lower() == b"authorization" and not self._credentials.authorization:
            self._credentials = self._credentials._replace(authorization=value)
        elif name.lower() == b"cookie" and not self._credentials.cookie:
            self._credentials = self._credentials._replace(cookie=value)
        elif name.lower() == b"content-length":
            with contextlib.suppress(ValueError):  # the parser judges it
                self._length = max(self._length, int(value))
        elif name.lower() == b"expect" and value.strip().lower() != b"100-continue":
            raise _Refused(417, "No expectation but 100-continue is met.")

    def on_headers_complete(self) -> None:
        self._limit = self._bounds.largest_body(self._path())
        self._check_body(self._length)
        self._shown = self._tokens is None or self._tokens.is_proven(self._credentials)
        if self._tokens is not None and self._shown:
            self._caller.proven()
        self._part = _Part.BODY
        self._fed = 0
        self._body_until = self._loop.time() + self._bounds.body_s
        self._await_body()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._check_body(self._body)
        self._await_body()

    def on_message_complete(self) -> None:
        self._part = _Part.ANSWER
        self._fed = 0
        self._disarm()
        if self._tokens is None:
            self._caller.proven()

    # -- inside --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget the last request."""
        self._url = b""
        self._credentials = Credentials()
        self._length = self._body = self._head = 0
        self._limit = self._bounds.body_bytes

    def _parse(self, data: bytes) -> None:
        self._fed += len(data)
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as asked:
                    data = self._upgrade(data[asked.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Refused):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError:
            raise _Refused(400, "This is no HTTP request.") from None
        if self._part in (_Part.HEAD, _Part.ANSWER):
            self._check_head(self._fed)

    def _upgrade(self, rest: bytes) -> bytes:
        """What of the bytes after a request for another protocol is to be parsed."""
        if self._path() not in self._websockets:
            self._deaf = True
            return b""
        if self._shown:
            self._part = _Part.OPEN
            self._disarm()
            self._disarm_write()
            return b""
        self._parser = httptools.HttpRequestParser(self)  # it is refused: the next request may show a token
        self._fed = len(rest)
        return rest

    def _path(self) -> str:
        return self._url.partition(b"?")[0].decode("latin-1")

    def _count(self, nbytes: int) -> None:
        self._head += nbytes
        self._check_head(self._head)

    def _check_head(self, nbytes: int) -> None:
        if nbytes > self._bounds.head_bytes:
            raise _Refused(431, f"The request's head is larger than {self._bounds.head_bytes} bytes.")

    def _check_body(self, nbytes: int) -> None:
        if nbytes > self._limit:
            raise _Refused(413, f"The request's body is larger than {self._limit} bytes.")

    def _await_body(self) -> None:
        left_s = min(self._bounds.body_idle_s, self._body_until - self._loop.time())
        self._arm(max(0.0, left_s), 408, "The request's body did not come in time.")

    def _arm(self, seconds: float, status: int, why: str) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, self._refuse, status, why)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disarm_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, status: int, why: str) -> None:
        """Answer, and end the connection; the server behind hears only that it was lost."""
        self._part = _Part.REFUSED
        self._disarm()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        # A body that was not read would make the kernel take the answer back, so it is read and dropped for a moment.
        transport.resume_reading()
        transport.write(_answer(status, why))
        if transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer has gone
                transport.write_eof()
        self._timer = self._loop.call_later(LINGER_S, self._cut)

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _answer(status: int, why: str) -> bytes:
    """Problem details of RFC 9457; `message` and `error` are for OpenAI's clients."""
    error = {"message": why, "type": "invalid_request_error", "code": "invalid", "param": None}
    told = {
        "type": "about:blank",
        "status": status,
        "code": "invalid",
        "title": _REASONS[status],
        "detail": why,
        "message": why,
        "error": error,
    }
    body = json.dumps(told).encode()
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (status, _REASONS[status].encode(), len(body), body)
    )
