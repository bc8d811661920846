"""The measured process of `bench/rollouts.py`: a real RolloutManager with its ledger, pinned to one core.

Started with its options as one JSON argument; answers one JSON line on stdout to each line on stdin:
`stats` (figures since the last `reset`), `reset`, `checkpoint`, `stop`.

With `{"echo": true}` it is a bare aiohttp WebSocket server instead, which decodes nothing and answers each message
with as many bytes as an acknowledgement has: the floor of what any manager on aiohttp costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import WSMsgType, web

from gyre.malloc_tuning import calm_collector
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.plane.events import AgentSent
from gyre.rollouts.plane.instructions import Instruction
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.trainer import TrainerSent
from gyre.rollouts.protocol.codec import encode
from gyre.rollouts.protocol.frames import Ack, Request
from gyre.rollouts.protocol.progress import Report
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import open_store


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    p50, p90, p99, top = np.quantile(np.array(values), [0.5, 0.9, 0.99, 1.0]).tolist()
    return {
        "n": len(values),
        "p50_ms": p50 * 1e3,
        "p90_ms": p90 * 1e3,
        "p99_ms": p99 * 1e3,
        "max_ms": top * 1e3,
    }


ASSIGN = b"\x92\xa6assign"
"""How an Assign frame begins: an array of two, a text of six."""


class Figures:
    """What was measured since the last reset."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.usage = resource.getrusage(resource.RUSAGE_SELF)
        self.written = disk_bytes()
        self.commit_s: list[float] = []
        self.write_s: list[float] = []
        self.freed_s: list[float] = []
        self.asked_s: list[float] = []
        self.committed_tokens = 0
        self.reports = 0
        self.generated = 0
        self.finished = 0


class MeasuredManager(RolloutManager):
    figures: Figures
    _freed_at: float | None = None
    _asked_at: float | None = None
    _first_at: float | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._handle = self.shell.handle
        self.shell.handle = self._happens  # type: ignore[method-assign]
        self._write = self.shell.write
        self.shell.commits._write = self._timed_write

    def _happens(self, event: object) -> list[Instruction]:
        if isinstance(event, AgentSent) and isinstance(event.frame, Report):
            self._reported(event.frame)
        elif isinstance(event, TrainerSent) and isinstance(event.frame, Request) and self._asked_at is None:
            self._asked_at = time.monotonic()
        return self._handle(event)

    def _reported(self, frame: Report) -> None:
        now = time.monotonic()
        self.figures.reports += 1
        if frame.ends and self._freed_at is None:
            self._freed_at = now
        if self._first_at is None and (frame.columns[0] or frame.ends):
            self._first_at = now
        self.figures.finished += len(frame.ends)

    def _timed_write(self, batch: WriteBatch) -> None:
        first, self._first_at = self._first_at, None
        tokens = sum(len(frame.tokens) for delta in batch.deltas for frame in delta.reports)
        began = time.monotonic()
        self._write(batch)
        now = time.monotonic()
        self.figures.write_s.append(now - began)
        if first is not None:
            self.figures.commit_s.append(now - first)
        self.figures.committed_tokens += tokens


def disk_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("wchar")).split()[1])


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def on_assign_written(manager: MeasuredManager) -> None:
    """Assignments written out end the two stopwatches."""
    now = time.monotonic()
    if manager._freed_at is not None:
        manager.figures.freed_s.append(now - manager._freed_at)
        manager._freed_at = None
    if manager._asked_at is not None:
        manager.figures.asked_s.append(now - manager._asked_at)
        manager._asked_at = None


class Plane(HearsOfPlane):
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.database = Path(options["folder"]) / "gyre.db"
        self.events: list[tuple[float, str, dict[str, Any]]] = []

    async def run(self) -> None:
        store = open_store(f"sqlite:///{self.database}")
        store.create_job(job_id="bench", name="bench", spec={}, now=time.time())
        manager = MeasuredManager(
            store.rollouts("bench"),
            term=1,
            token="bench",
            settings=ManagerSettings(**self.options.get("settings", {})),
            owner=self,
        )
        manager.figures = Figures()
        if self.options.get(
            "first_takes_all"
        ):  # what a sample is given to first it stays with, but for great gains
            manager.groups.deal = lambda now: {}  # type: ignore[method-assign]
            object.__setattr__(manager.groups.placement.settings, "cheap_moves", 0)
        calm_collector()
        watch_writes(manager)
        port = await manager.start("127.0.0.1", 0)
        say({"port": port})
        async for line in lines():
            if line == "stop":
                break
            say(self.answer(line, manager))
        missing = manager.groups.missing_tokens()
        await manager.stop()
        store.close()
        say({"missing_tokens": missing})

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        if self.options.get("events"):
            self.events.append((time.monotonic(), kind, fields))
        if kind == "PeerRefused":
            print(kind, fields, file=sys.stderr)

    def fail(self, error: BaseException) -> None:
        import traceback

        traceback.print_exception(error)
        os._exit(1)

    def answer(self, line: str, manager: MeasuredManager) -> dict[str, Any]:
        if line == "reset":
            manager.figures = Figures()
            manager.figures.generated = manager.groups.account.generated
            self.events.clear()
            return {}
        if line == "checkpoint":
            with sqlite3.connect(self.database) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()
            return {"db_bytes": self.database.stat().st_size}
        figures = manager.figures
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = time.monotonic() - figures.began
        cpu = usage.ru_utime + usage.ru_stime - figures.usage.ru_utime - figures.usage.ru_stime
        generated = manager.groups.account.generated - figures.generated
        wal = Path(f"{self.database}-wal")
        return {
            "seconds": seconds,
            "cpu_s": cpu,
            "cpu_share": cpu / seconds,
            "accepted_tokens": generated,
            "accepted_tokens_s": generated / seconds,
            "committed_tokens_s": figures.committed_tokens / seconds,
            "reports_s": figures.reports / seconds,
            "finished_s": figures.finished / seconds,
            "commit": quantiles(figures.commit_s),
            "write": quantiles(figures.write_s),
            "freed_to_written": quantiles(figures.freed_s),
            "asked_to_written": quantiles(figures.asked_s),
            "rss_mib": rss_mib(),
            "db_mib": self.database.stat().st_size / 2**20,
            "wal_mib": wal.stat().st_size / 2**20 if wal.exists() else 0.0,
            "written_bytes": disk_bytes() - figures.written,
            "in_flight": sum(len(instance.held) for instance in manager.groups.instances.values()),
            "queued": len(manager.groups.placement.queue),
            "samples_delivered": manager.groups.account.samples_delivered,
            "events": self.events[-1000:] if self.options.get("events") else [],
        }


def watch_writes(manager: MeasuredManager) -> None:
    """Tell when an Assign frame has been handed to the operating system (or to the transport, behind others)."""
    send_bytes = web.WebSocketResponse.send_bytes

    async def send(self: web.WebSocketResponse, data: bytes, compress: int | None = None) -> None:
        await send_bytes(self, data, compress)
        if data[: len(ASSIGN)] == ASSIGN:
            on_assign_written(manager)

    web.WebSocketResponse.send_bytes = send  # type: ignore[method-assign]


async def echo(options: dict[str, Any]) -> None:
    reply = encode(Ack(seq=1 << 20))
    count = 0

    async def route(request: web.Request) -> web.WebSocketResponse:
        nonlocal count
        socket = web.WebSocketResponse(max_msg_size=64 << 20, compress=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                count += 1
                await socket.send_bytes(reply)
        return socket

    application = web.Application()
    application.add_routes([web.get("/v1/agent", route)])
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    say({"port": int(runner.addresses[0][1])})
    began, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    async for line in lines():
        now = resource.getrusage(resource.RUSAGE_SELF)
        seconds = time.monotonic() - began
        cpu = now.ru_utime + now.ru_stime - usage.ru_utime - usage.ru_stime
        if line == "stop":
            break
        if line == "reset":
            began, usage, count = time.monotonic(), now, 0
            say({})
        else:
            say({"cpu_share": cpu / seconds, "reports_s": count / seconds})
    await runner.cleanup()
    say({})


async def lines() -> Any:
    """What comes on stdin; its end is a `stop`."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()
    yield "stop"


def say(body: dict[str, Any]) -> None:
    print(json.dumps(body), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {options["core"]})
    asyncio.run(echo(options) if options.get("echo") else Plane(options).run())


if __name__ == "__main__":
    main()
