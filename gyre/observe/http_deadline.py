"""Deadlines for whole requests of httpx, whose own timeouts begin anew with each byte: a server that drips its head is
waited for no longer than one that says nothing.

    client = bounded(httpx.Client(...))
    with within(10.0):
        client.post(...)

Invariant *one deadline*: connecting, TLS, sending, the head and the body of all requests within a block end together,
as httpx.TimeoutException. A look-up of a name has the resolver's own deadline.

This module must not know what is asked of whom.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore
import httpx

_WRITTEN_AT_ONCE = 64 << 10
"""Bytes between two looks at the clock: each part has what is left of the time."""

_block = threading.local()
"""`until` is the deadline of this thread's block, by time.monotonic."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What bounded clients do in this block, on this thread, ends after so many seconds."""
    before = getattr(_block, "until", None)
    _block.until = time.monotonic() + seconds
    try:
        yield
    finally:
        _block.until = before


def bounded(client: httpx.Client) -> httpx.Client:
    """The same client, which keeps the deadlines of `within`. Its connections must not have been used yet."""
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):  # else a transport of a test's
            pool = transport._pool
            pool._network_backend = _Backend(pool._network_backend)
    return client


def _left_s(timeout: float | None, error: type[Exception]) -> float | None:
    """The smaller of a timeout and what is left of the block. Raises `error` where nothing is."""
    until = getattr(_block, "until", None)
    if until is None:
        return timeout
    left: float = until - time.monotonic()
    if left <= 0:
        raise error("the deadline of the whole request has passed")
    return left if timeout is None else min(timeout, left)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.connect_tcp(host, port, left, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        left = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.connect_unix_socket(path, left, socket_options))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), _WRITTEN_AT_ONCE):
            part = buffer[at : at + _WRITTEN_AT_ONCE]
            self._inner.write(part, _left_s(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
