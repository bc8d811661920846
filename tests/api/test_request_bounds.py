"""The bounds before both HTTP ports: half-open requests end, large ones are refused, and callers make room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from unittest.mock import Mock

import pytest

from gyre.api.rest import RestServer, create_app
from gyre.ports.bounds import PortBounds
from gyre.ports.http_gate import Credentials, HearsOfCaller, HttpGate
from gyre.ports.listener import Listener, SparseLog, Unproven, bind
from gyre.testing.clock import VirtualClock
from tests.doubles.standing_job import StandingJob
from tests.waits import GENEROUS_S

QUICK = PortBounds(head_s=0.2, body_idle_s=0.2, body_s=0.4, head_bytes=4096, body_bytes=1000, unproven=8)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HT", b"408"),
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"408"),
        (b"POST /api/v1/jobs/small:stop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{", b"408"),
        (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 300000000\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n800\r\n" + b"x" * 2048, b"413"),
        (b"GET / HTTP/1.1\r\nlarge: " + b"x" * 5000, b"431"),
        (b"no request\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nExpect: \xff\r\n\r\n", b"417"),
    ],
)
def test_a_request_has_an_end(shared_job: StandingJob, sent: bytes, status: bytes) -> None:
    server = RestServer(create_app(shared_job.master, token=None), bounds=QUICK)
    port = int(server.start().rpartition(":")[2])
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=GENEROUS_S) as link:
            link.sendall(sent)
            answer = b""
            while part := link.recv(1 << 16):
                answer += part
        assert status in answer.partition(b"\r\n")[0]
    finally:
        server.stop()


@pytest.mark.parametrize(("token", "opens"), [(b"", False), (b"wrong", False), (b"good", True)])
async def test_only_a_token_opens_a_websocket(token: bytes, opens: bool) -> None:
    """Without one the connection keeps its bounds, and what comes after the request does not reach the server."""
    received: list[bytes] = []

    class Server(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.append(data)

    class Tokens:
        def is_proven(self, shown: Credentials) -> bool:
            return shown.authorization == b"good"

    gate = HttpGate(Server(), QUICK, Mock(spec=HearsOfCaller), tokens=Tokens(), websockets=frozenset({"/ws"}))
    gate.connection_made(Mock(spec=asyncio.Transport))
    gate.data_received(
        b"GET /ws HTTP/1.1\r\nHost: a\r\nAuthorization: %b\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        % token
    )
    gate.data_received(b"frame")
    assert (b"frame" in received) is opens
    gate.connection_lost(None)


@pytest.mark.parametrize("ends", [False, True])
async def test_who_has_sent_a_request_or_has_gone_is_not_counted(ends: bool) -> None:
    listener = Listener(bind("127.0.0.1", 0), asyncio.Protocol, PortBounds(head_s=600.0))
    (listening,) = listener._sockets
    listener.start()
    _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
    async with asyncio.timeout(GENEROUS_S):
        while listener.unproven != 1:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)
        if ends:
            writer.close()
        else:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        while listener.unproven:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert writer.is_closing() is ends
    writer.close()
    listener.close()
    await listener.wait_closed()


def test_the_oldest_unproven_callers_make_room(shared_job: StandingJob) -> None:
    bounds = PortBounds(unproven=8, head_s=600.0)
    server = RestServer(create_app(shared_job.master, token=None), bounds=bounds)
    port = int(server.start().rpartition(":")[2])
    links = [socket.create_connection(("127.0.0.1", port), timeout=GENEROUS_S) for _ in range(40)]
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=GENEROUS_S) as honest:
            honest.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert honest.recv(1 << 12).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionResetError):
            assert links[0].recv(1) == b""
    finally:
        for link in links:
            link.close()
        server.stop()


def test_a_crowd_at_one_address_harms_no_other() -> None:
    callers: Unproven[int] = Unproven(most=4, most_per_address=3)
    assert [callers.add(n, "a") for n in range(3)] == [[], [], []]
    assert callers.add(9, "b") == []
    assert callers.add(3, "a") == [0]
    assert callers.add(10, "c") == [1]
    assert 9 in callers
    assert len(callers) == 4


def test_one_cause_is_one_line_a_second() -> None:
    clock = VirtualClock()
    sparse = SparseLog(clock=clock)

    def record() -> logging.LogRecord:
        return logging.LogRecord("asyncio", logging.ERROR, "", 0, "accept %s", ("x",), None)

    assert [sparse.filter(record()) for _ in range(1235)].count(True) == 1
    clock.advance(1.0)
    later = record()
    assert sparse.filter(later)
    assert later.getMessage() == "accept x (… and 1,234 more)"
