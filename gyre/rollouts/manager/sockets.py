"""The WebSockets of the rollout manager's peers.

Invariant *every request has an end*: a WebSocket's first frame has a deadline, and so has its close.

This module must not know what frames bring about.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import WSMsgType, web

from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, unpack
from gyre.rollouts.protocol.connection import watch_acknowledgements
from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import Frame
from gyre.rollouts.protocol.progress import Report

CLOSE_WITHIN_S = 3.0
"""How long a closing connection may take to send its queue."""


async def websocket(request: web.Request, plane: Plane) -> web.WebSocketResponse:
    if request.transport is not None:
        watch_acknowledgements(request.transport.get_extra_info("socket"))
    socket = web.WebSocketResponse(
        max_msg_size=MAX_FRAME_BYTES, compress=False, heartbeat=plane.settings.heartbeat_s
    )
    try:
        await socket.prepare(request)
    except ValueError:  # a header that is no text, which the library reads or repeats all the same
        plane.refused += 1
        said = '{"code": "invalid", "message": "A header is not text."}'
        raise web.HTTPUnprocessableEntity(text=said, content_type="application/json") from None
    return socket


async def first_frame(socket: web.WebSocketResponse, settings: ManagerSettings) -> Frame | Report:
    """Raises FrameError where none comes in time."""
    try:
        message = await socket.receive(timeout=settings.hello_timeout_s)
    except TimeoutError:
        raise refuse("no_hello", "nothing came within the time for a hello") from None
    if message.type is not WSMsgType.BINARY:
        raise refuse("no_hello", "the first message is no frame")
    return unpack(message.data)


@contextlib.asynccontextmanager
async def connected(connection: Connection) -> AsyncIterator[Connection]:
    """A block during which the connection's queue is written; the rest is written at its end, within a limit."""
    writer = asyncio.create_task(connection.write())
    try:
        yield connection
    finally:
        connection.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(writer), CLOSE_WITHIN_S)
        writer.cancel()
