"""The connections to the rollout manager, each with its queue of frames.

Invariant *nobody waits for one*: a peer that does not read is cut off, and never slows a sender.

This module must not know what the frames bring about.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from gyre.rollouts.protocol.codec import encode
from gyre.rollouts.protocol.frames import Frame

AT_ONCE_BYTES = 16 << 10
"""Largest frame that its sender writes itself if nothing is queued: a quarter of what a transport holds before it asks
to wait."""

SEND_LIMIT_BYTES = 256 << 20
"""Most bytes that wait for a peer that does not read; beyond them the connection is cut, and the peer dials again."""


class HasMore(Protocol):
    def read(self, peer: Connection) -> None:
        """The peer has read something: there is room for more."""


@dataclass(eq=False, slots=True)
class Connection:
    """One connection of a peer. A small frame is written at once if the peer reads; other frames are queued, and a task
    writes them."""

    socket: web.WebSocketResponse
    name: str
    transport: asyncio.BaseTransport | None = None
    send_timeout_s: float = 30.0
    source: HasMore | None = None
    """Whose frames wait until there is room for them; it hears of each queued frame that is written."""
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    waiting_bytes: int = 0
    closing: bool = False
    ended: bool = False
    """Nothing more is queued."""

    @property
    def host(self) -> str:
        """The address that it dialled from; "" where that is not known."""
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return str(peer[0]) if isinstance(peer, tuple) and peer else ""

    def send(self, frame: Frame) -> None:
        if self.ended:
            return
        data = encode(frame)
        if not self.waiting_bytes and len(data) <= AT_ONCE_BYTES and self._reads():
            self._write_at_once(data)
            return
        self.waiting_bytes += len(data)
        if self.waiting_bytes > SEND_LIMIT_BYTES:
            self.cut()
            return
        self.queue.put_nowait(data)

    def _reads(self) -> bool:
        """Whether the system has taken all that was written so far."""
        transport = self.transport
        return isinstance(transport, asyncio.WriteTransport) and not transport.get_write_buffer_size()

    def _write_at_once(self, data: bytes) -> None:
        """Write a frame in one step: aiohttp awaits only room in the transport, and there is room."""
        writing = self.socket.send_bytes(data)
        try:
            writing.send(None)
        except StopIteration:
            return
        except (ConnectionError, RuntimeError):  # gone, which the reading side notices and tells
            return
        writing.close()  # the frame is written; the next one finds that the peer does not read, and is queued

    def close(self) -> None:
        """Close the connection after the queued frames."""
        if not self.ended:
            self.ended = self.closing = True
            self.queue.put_nowait(None)

    def cut(self) -> None:
        """Close the connection at once, because the peer does not read."""
        self.close()
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()

    async def write(self) -> None:
        while (data := await self.queue.get()) is not None:
            try:
                async with asyncio.timeout(self.send_timeout_s):
                    await self.socket.send_bytes(data)
            except (ConnectionError, RuntimeError):  # gone, which the reading side notices and tells
                return
            except TimeoutError:
                self.cut()
                return
            self.waiting_bytes -= len(data)
            if self.source is not None:
                self.source.read(self)
        with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self.socket.close(), 2.0)
