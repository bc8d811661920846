"""What chat clients' SDKs say in headers, and how a finished turn goes out as a stream.

This module must not know what a turn is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aiohttp import web

from gyre.chat.retries import NUMBER

SESSION_PATH = "/s/{session}"
"""Before a dialect's own path: a base URL with a path works with every client."""


def retries_of(request: web.Request) -> int:
    """How often the client's SDK has asked before; 0 where it does not say."""
    return _count(request.headers.get("x-stainless-retry-count", "")) or 0


def number_of(request: web.Request) -> int | None:
    """Which of its equal requests it is, of a client that counts them; None where it does not say."""
    return _count(request.headers.get(NUMBER, ""))


def _count(told: str) -> int | None:
    return int(told) if told.isascii() and told.isdecimal() and len(told) < 5 else None


def is_there(request: web.Request) -> bool:
    """Whether the client is, as far as its connection says."""
    return request.transport is not None and not request.transport.is_closing()


async def whole(request: web.Request, response: web.Response) -> web.Response:
    """The response, which was sent as far as the client was there."""
    with contextlib.suppress(ConnectionError):  # the client has gone; the turn is kept
        await response.prepare(request)
        await response.write_eof()
    return response


async def streamed(request: web.Request, events: Iterator[bytes]) -> web.StreamResponse:
    """The whole turn as a stream: its head waited until nobody would have to ask again."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with contextlib.suppress(ConnectionError, RuntimeError):  # the client has gone; the turn is kept
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
    return response
