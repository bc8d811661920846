"""The bounds before the manager's port: what is half open ends, and only a token opens a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gyre.ports.bounds import PortBounds
from tests.rollouts.plane import TOKEN, Plane
from tests.waits import GENEROUS_S

QUICK = PortBounds(
    head_s=0.2, body_idle_s=0.2, body_s=0.4, keep_alive_s=0.2, head_bytes=4096, body_bytes=1000
)

BEARER = f"Host: a\r\nAuthorization: Bearer {TOKEN}\r\n"

UPGRADE = (
    "GET /v1/agent HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


async def answer(plane: Plane, sent: bytes) -> bytes:
    """All that the manager's port says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", plane.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(GENEROUS_S):
            return await reader.read()
    finally:
        writer.close()


async def restart(plane: Plane, bounds: PortBounds) -> None:
    plane.bounds = bounds
    await plane.kill()
    await plane.start()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"GET /v1/agent HTTP/1.1\r\nHost: a\r\n", b"408"),
        (f"GET /v1/status HTTP/1.1\r\n{BEARER}".encode(), b"408"),
        (f"POST /v1/drain HTTP/1.1\r\n{BEARER}Content-Length: 9\r\n\r\n{{".encode(), b"408"),
        (b"POST /v1/drain HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n", b"413"),
        (b"GET / HTTP/1.1\r\nlarge: " + b"x" * 5000, b"431"),
        (b"no request\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nExpect: \xff\r\n\r\n", b"417"),
    ],
)
async def test_a_request_has_an_end(plane: Plane, sent: bytes, status: bytes) -> None:
    await restart(plane, QUICK)
    assert status in (await answer(plane, sent)).partition(b"\r\n")[0]


@pytest.mark.parametrize("token", ["", "Authorization: Bearer wrong\r\n"], ids=["no token", "a wrong one"])
async def test_an_upgrade_without_a_token_opens_nothing(plane: Plane, token: str) -> None:
    """A caller who is refused stays bounded: whatever it sends is dropped, and the connection ends by itself."""
    await restart(plane, QUICK)
    head = (UPGRADE + token + "\r\n").encode()
    said = await answer(plane, head + b"\r\n" * 10_000)
    assert said.startswith(b"HTTP/1.1 401")


async def test_an_upgrade_with_a_token_has_no_deadline_of_a_request(plane: Plane) -> None:
    await restart(plane, QUICK)
    agent = await plane.agent("a")
    await asyncio.sleep(2 * QUICK.body_s)
    await agent.wire.echo()
    assert not agent.wire.socket.closed


async def test_silent_callers_make_room_for_an_agent(plane: Plane) -> None:
    await restart(plane, PortBounds(unproven=8, head_s=600.0))
    crowd = [await asyncio.open_connection("127.0.0.1", plane.port) for _ in range(40)]
    try:
        await plane.agent("a")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(crowd[0][0].read(1), GENEROUS_S) == b""
        assert plane.manager._listener is not None
        assert plane.manager._listener.unproven <= 8
    finally:
        for _, writer in crowd:
            writer.close()
