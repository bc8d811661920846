"""The rollout manager's port: raw bytes, HTTP that no client sends, and WebSockets with frames of any kind."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import tempfile
import threading
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.protocol.codec import encode
from gyre.store import open_store
from tests.fuzz.frames import hostile_frame
from tests.fuzz.http_bytes import answer_to, status_of, strange_request
from tests.fuzz.inputs import damaged
from tests.fuzz.sessions import LOADED, hello
from tests.fuzz.target import Broken, Target

HONEST_EACH = 16
"""An honest peer asks after so many cases."""

PATHS = (b"/v1/status", b"/v1/agent", b"/v1/trainer", b"/v1/drain", b"/", b"/v1")
BODIES = ((b"/v1/drain", {"instance": "nobody", "deadline_s": 3.0, "reason": "asked"}),)
HEADERS = (b"Host: 127.0.0.1", b"Authorization: Bearer secret", b"Connection: close")
UPGRADE = (
    b"GET /v1/%b HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


LIBRARYS_OWN = (ConnectionError, HttpProcessingError, web.RequestPayloadError)
"""The peer has gone, or what it sent is no HTTP: the library tells it so."""


class Told(logging.Handler):
    """The errors that a server logged: what it did not expect."""

    def __init__(self, *names: str) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self._loggers = [logging.getLogger(name) for name in names]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        error = record.exc_info[1] if record.exc_info else None
        if "/gyre/" in text and not isinstance(error, LIBRARYS_OWN):
            self.said.append(text[-1400:])

    def end(self) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True

    def check(self) -> None:
        said, self.said = self.said, []
        if said:
            raise Broken(f"the server did not expect it: {said[0]}")


class ManagerPort(Target, HearsOfPlane):
    name = "manager port"
    share = 0.01
    traced = False

    def start(self) -> None:
        self._told = Told("aiohttp.server", "aiohttp.web", "asyncio")
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-fuzz-")
        self._store = open_store(f"sqlite:///{Path(self._folder.name) / 'gyre.db'}")
        self._store.create_job(job_id="job", name="job", spec={}, now=0.0)
        self._fatal: list[BaseException] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Nobody asks here."""

    def fail(self, error: BaseException) -> None:
        self._fatal.append(error)

    async def _listen(self) -> int:
        self._manager = RolloutManager(
            self._store.rollouts("job"),
            term=1,
            token="secret",
            join_token="join",
            owner=self,
        )
        return await self._manager.start("127.0.0.1", 0)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._store.close()
        self._folder.cleanup()
        self._told.end()

    async def _end(self) -> None:
        await self._manager.stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        sent.append(self._conversation(draw) if draw.randrange(3) == 0 else self._request(draw))
        status = status_of(answer_to(sent[0], self._port))
        self._told.check()
        if status >= 500:
            raise Broken(f"it answered {status}")
        if self._fatal:
            raise Broken(f"the manager ended: {self._fatal.pop()!r}")
        if draw.randrange(HONEST_EACH) == 0:
            self._serve_the_honest()
        return 0 < status < 400

    def _serve_the_honest(self) -> None:
        asked = (
            b"GET /v1/status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nConnection: close\r\n\r\n"
        )
        answer = answer_to(asked, self._port, rude=False)
        if status_of(answer) != 200 or "epoch" not in json.loads(answer.partition(b"\r\n\r\n")[2]):
            raise Broken("an honest peer got no status")

    def _request(self, draw: Random) -> bytes:
        return strange_request(draw, PATHS, BODIES, HEADERS)

    def _conversation(self, draw: Random) -> bytes:
        """A WebSocket, and what is said over it."""
        route = draw.choice((b"agent", b"agent", b"trainer"))
        out = [UPGRADE % route]
        for _ in range(draw.randrange(5)):
            good = encode(hello("bad")) if route == b"agent" and draw.randrange(2) else encode(LOADED)
            out.append(message(draw.choice((good, hostile_frame(draw))), draw))
        return damaged(b"".join(out), draw) if draw.randrange(8) == 0 else b"".join(out)


def message(data: bytes, draw: Random) -> bytes:
    """A masked WebSocket message, or what should be one."""
    kind = draw.choice((0x82,) * 9 + (0x81, 0x80, 0x88, 0x89, 0x8A, 0x02, 0xF2, 0x83, 0x8F))
    size = len(data)
    match draw.randrange(12):
        case 0:
            return (
                bytes((kind, 0xFF)) + struct.pack(">Q", draw.choice((1 << 60, 1 << 63, 65 << 20))) + b"\0" * 8
            )
        case 1:
            return bytes((kind, min(size, 125))) + data[:125]  # not masked
        case _:
            head = (
                bytes((kind, 0x80 | size))
                if size < 126
                else bytes((kind, 0xFE)) + struct.pack(">H", size & 0xFFFF)
            )
            return head + b"\0\0\0\0" + data
