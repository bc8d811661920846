"""Server-sent events: one poller for all clients, and a bounded queue for each.

Invariants:
- *one waiter*: however many clients there are, one thread waits for the journal;
- *nothing missing, nothing twice*: a client gets every event after the one it named, in order; sequence
  numbers are dense, so a gap is seen and filled from the journal;
- *a slow client costs a bounded queue*: when its queue is full it is emptied, and the client is read on from
  the journal when it next takes something;
- *quiet lines stay open*: a comment goes out every `heartbeat_s`.

This module must not know what an event means.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gyre.errors import GyreError
from gyre.master.master_api import MasterApi

HEARTBEAT_S = 15.0
QUEUE_BATCHES = 64
PAGE = 500
POLL_S = 1.0
"""How long one wait for the journal lasts: what closing the server may have to wait for."""

RETRY_AFTER_S = 0.5

log = logging.getLogger(__name__)


class _Client:
    """One open stream. `behind`: its queue has a gap, so the journal has to be read."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue(QUEUE_BATCHES)
        self.behind = True

    def offer(self, batch: list[dict[str, Any]]) -> None:
        try:
            self.queue.put_nowait(batch)
        except asyncio.QueueFull:
            self.fall_behind()

    def fall_behind(self) -> None:
        """Forget the queue, and wake the client if it waits."""
        self.catch_up()
        self.behind = True
        self.queue.put_nowait([])

    def catch_up(self) -> None:
        self.behind = False
        while not self.queue.empty():
            self.queue.get_nowait()


class Broadcaster:
    """The streams of one event loop. The poller runs only while there is a client."""

    def __init__(self, port: MasterApi, *, heartbeat_s: float = HEARTBEAT_S, poll_s: float = POLL_S) -> None:
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._poll_s = poll_s
        self._clients: set[_Client] = set()
        self._poller: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether it has no client, and no poller that has not noticed so yet."""
        return not self._clients and (self._poller is None or self._poller.done())

    def close(self) -> None:
        """End every stream and the poller. Call it on the loop that the streams run on."""
        self._closed = True
        for client in self._clients:
            client.fall_behind()
        if self._poller is not None:
            self._poller.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def stream(self, *, after: int) -> AsyncGenerator[bytes, None]:
        """The wire form of every event after `after`, for as long as the caller takes it."""
        client = _Client()
        self._clients.add(client)
        last = after
        try:
            yield b"retry: 1000\n\n"
            while not self._closed:
                if client.behind:
                    client.catch_up()
                    self._ensure_polling()
                    batch = await self._read(last)
                    client.behind = client.behind or len(batch) == PAGE
                else:
                    try:
                        async with asyncio.timeout(self._heartbeat_s):
                            batch = await client.queue.get()
                    except TimeoutError:
                        yield b": heartbeat\n\n"
                        continue
                    batch = [event for event in batch if event["seq"] > last]
                    if batch and batch[0]["seq"] != last + 1:
                        client.behind = True
                        continue
                if batch:
                    last = batch[-1]["seq"]
                    yield b"".join(map(encode_event, batch))
        except GyreError as error:
            log.warning("an event stream ended, its client will come back: %s", error)
        finally:
            self._clients.discard(client)

    # -- the one poller -----------------------------------------------------------------------------

    def _ensure_polling(self) -> None:
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="gyre-events")

    async def _poll(self) -> None:
        """Poll for new events; ends by itself when no client is left."""
        last: int | None = None
        while self._clients and not self._closed:
            try:
                if last is None:
                    last = (await asyncio.to_thread(self._port.view))["seq"]
                    for client in self._clients:  # what came between their reading and here
                        client.fall_behind()
                if await self._wait(last):
                    batch = await self._read(last)
                    last = batch[-1]["seq"] if batch else last
                    for client in self._clients:
                        client.offer(batch)
            except Exception:
                log.exception("reading new events failed; trying again")
                await asyncio.sleep(RETRY_AFTER_S)

    async def _read(self, after: int) -> list[dict[str, Any]]:
        batch: list[dict[str, Any]] = await asyncio.to_thread(self._port.events, after=after, limit=PAGE)
        return batch

    async def _wait(self, after: int) -> bool:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="gyre-events")

        def wait() -> bool:
            return self._port.wait_for_events(after=after, timeout_s=self._poll_s)

        return await asyncio.get_running_loop().run_in_executor(self._thread, wait)


class Broadcasters:
    """The streams of all jobs of an app: for each job with a client a `Broadcaster` of its own."""

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._by_job: dict[str, Broadcaster] = {}

    def of(self, job_id: str, port: MasterApi) -> Broadcaster:
        """Call it on the loop that the streams run on."""
        for idle in [known for known, one in self._by_job.items() if known != job_id and one.is_idle]:
            self._by_job.pop(idle).close()
        if job_id not in self._by_job:
            self._by_job[job_id] = Broadcaster(port, heartbeat_s=self._heartbeat_s)
        return self._by_job[job_id]

    def close(self) -> None:
        """End every stream. Call it on the loop that the streams run on."""
        for one in self._by_job.values():
            one.close()


def encode_event(event: dict[str, Any]) -> bytes:
    """One event in the wire form of server-sent events: the sequence as id, the kind as event."""
    data = json.dumps(event, separators=(",", ":"), ensure_ascii=True)
    return f"id: {event['seq']}\nevent: {event['kind']}\ndata: {data}\n\n".encode()
