"""A TCP proxy that can swallow: its connections stand, and nothing of what is sent arrives, as when a machine between
two others vanished."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SwallowingProxy:
    """Forwards to `port`. Connections that exist when `swallow` is called are dead from then on, though nobody is told;
    with `new_too`, those that are made afterwards too, until `forward`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.own_port = 0
        self.accepted = 0
        self._generation = 0
        self._swallows_new = False
        self._tasks: set[asyncio.Task[None]] = set()

    def swallow(self, *, new_too: bool = False) -> None:
        self._generation += 1
        self._swallows_new = new_too

    def forward(self) -> None:
        self._swallows_new = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.own_port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._swallows_new:
                while await reader.read(1 << 16):
                    pass
                return
            with contextlib.suppress(OSError):
                their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    await asyncio.gather(
                        self._copy(reader, their_writer, self._generation),
                        self._copy(their_reader, writer, self._generation),
                    )
                finally:
                    their_writer.close()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int
    ) -> None:
        while data := await reader.read(1 << 16):
            if generation == self._generation:
                writer.write(data)
                await writer.drain()
        if generation == self._generation:
            writer.write_eof()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def swallowing_proxy(port: int) -> AsyncIterator[SwallowingProxy]:
    proxy = SwallowingProxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.own_port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()
