"""What the door of a fleet adds to an engine's own time, at the median and at p99, with many requests open.

    python bench/door.py [--open 1000] [--rate 100] [--seconds 20] [--runs 3] [--dry-run] [--json FILE]

The rollout manager is the real one in a process of its own, with its ledger in SQLite on disk. Its one instance has a
process too; the engine is SIMULATED: it ends each sample after `--engine-s`, at once and whole. The clients are here.
Beside the requests that are measured, the rest of `--open` stay open: each has a token now and then.

    in      from the client's request until the instance has the sample
    out     from the instance's report of its end until the client has the answer: a commit is in it
    added   both together; how often instances report is not in it, nor how late a timer of asyncio's is

Two baselines have the same clients, with as many requests open:

    direct  a bare aiohttp server that answers after the engine's time: the client's own share
    relay   the shortest way that a door can take in Python: an aiohttp server gives each request to the instance, and
            answers when another thread has written a line for its end, which outlives the process, as a commit of the
            ledger does. It checks, balances and keeps nothing
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("direct", "relay", "door")
TOKEN = "bench"
PROMPT = list(range(256))
FIRST_MEASURED = 1_000_000
"""The last token of a measured request's prompt is this and its number."""


# -- the measured process ---------------------------------------------------------------------------------


async def serve_door(options: dict[str, Any]) -> None:
    from gyre.malloc_tuning import calm_collector
    from gyre.rollouts.manager.rollout_manager import RolloutManager
    from gyre.rollouts.plane.settings import DoorSettings, ManagerSettings
    from gyre.store import open_store

    folder = Path(options["folder"])
    store = open_store(f"sqlite:///{folder}/gyre.db")
    store.create_job(job_id="bench", name="bench", spec={}, now=time.time())
    timing = {key: options[key] for key in ("urgent_commit_s",) if options[key] is not None}
    door = DoorSettings(most_open=1 << 20, serves_folders=False, **timing)
    settings = ManagerSettings(door=door)
    manager = RolloutManager(store.rollouts("bench"), term=1, token=TOKEN, settings=settings)
    calm_collector()
    port = await manager.start("127.0.0.1", 0)
    await _until_told(port)
    await manager.stop()


async def serve_direct(options: dict[str, Any]) -> None:
    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        arrived = time.monotonic()
        await asyncio.sleep(3600.0 if asked["rid"].startswith("open-") else options["engine_s"])
        told = {"id": asked["rid"], "arrived": arrived, "ended": time.monotonic()}
        return web.json_response({"output_ids": [1], "meta_info": told})

    await _serve([web.post("/generate", generate)])


class Relay:
    """One instance, and a request a row. Ends that come while others are written are written together."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._ended: list[int] = []
        self._has_ended = asyncio.Event()

    async def run(self) -> None:
        writing = asyncio.create_task(self._write())
        routes = [web.post("/generate", self._generate), web.post("/v1/policies", self._publish)]
        await _serve([*routes, web.get("/v1/agent", self._agent)])
        writing.cancel()

    async def _publish(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        from gyre.rollouts.protocol.codec import encode
        from gyre.rollouts.protocol.frames import Assign, Assignment, Prompt

        asked = await request.json()
        row = len(self._waiting)
        ended = self._waiting[row] = asyncio.get_running_loop().create_future()
        prompt = Prompt(request_id=row, tokens=np.array(asked["input_ids"], "<i4").tobytes(), sampling={})
        work = Assignment(row=row, lease=1, key=row, request_id=row, prior=b"", seed=0)
        await self._socket.send_bytes(encode(Assign(prompts=[prompt], work=[work])))
        await ended
        return web.json_response({"output_ids": [1], "meta_info": {"id": asked["rid"]}})

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        from gyre.rollouts.protocol.codec import decode, encode
        from gyre.rollouts.protocol.frames import PROTOCOL, Weights, Welcome
        from gyre.rollouts.protocol.progress import GenerationProgress

        self._socket = web.WebSocketResponse(compress=False)
        await self._socket.prepare(request)
        version = Weights(version=0, checksum="none")
        welcome = Welcome(
            protocol=PROTOCOL, epoch=1, interval_s=1.0, keep=[], weights_key="none", weights=version
        )
        await self._socket.send_bytes(encode(welcome))
        async for message in self._socket:
            frame = decode(message.data)
            if isinstance(frame, GenerationProgress) and frame.ends:
                self._ended += [end.row for end in frame.ends]
                self._has_ended.set()
        return self._socket

    async def _write(self) -> None:
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            ended, self._ended = self._ended, []
            await asyncio.to_thread(os.write, self._file, b"".join(b"%d\n" % row for row in ended))
            for row in ended:
                self._waiting[row].set_result(None)


async def serve_relay(options: dict[str, Any]) -> None:
    await Relay(Path(options["folder"]) / "ends").run()


async def _serve(routes: list[web.RouteDef]) -> None:
    from gyre.malloc_tuning import calm_collector

    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)  # of requests that stay open
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    calm_collector()
    await _until_told(runner.addresses[0][1])
    await runner.cleanup()


async def _until_told(port: int) -> None:
    """Say the port, and go on until stdin ends."""
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


# -- the instance -----------------------------------------------------------------------------------------


class Instance:
    """It ends samples whose prompt says so after the engine's time, and gives the others a token at times."""

    def __init__(self, url: str, engine_s: float, interval_s: float) -> None:
        self.url = url
        self.engine_s, self.interval_s = engine_s, interval_s
        self.serving = asyncio.Event()
        self.arrived: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        """When the sample of a request that is measured came, and ended, by the request's number. The clock is the
        machine's, the same in every process."""
        self.held: dict[int, tuple[int, int]] = {}
        """(lease, tokens) of the samples that stay, by row."""
        self._seq = 0
        self._came = asyncio.Event()
        self._reports: set[asyncio.Task[None]] = set()

    async def has(self, count: int) -> None:
        """So many samples that stay are here."""
        while len(self.held) < count:
            self._came.clear()
            await self._came.wait()

    async def run(self, session: aiohttp.ClientSession) -> None:
        from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, decode, encode
        from gyre.rollouts.protocol.frames import PROTOCOL, Assign, Hello, Loaded, Weights, Welcome

        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.ws_connect(
            f"{self.url}/v1/agent", headers=headers, max_msg_size=MAX_FRAME_BYTES, compress=0
        ) as self.socket:
            hello = Hello(
                protocol=PROTOCOL,
                instance="engine",
                incarnation="1",
                model="unset",
                engine="simulated",
                max_running=1 << 14,
                kv_tokens=1 << 36,
            )
            await self.socket.send_bytes(encode(hello))
            growing = asyncio.create_task(self.grow())
            try:
                async for message in self.socket:
                    frame = decode(message.data)
                    weights = frame.weights if isinstance(frame, Welcome) else frame
                    if isinstance(weights, Weights):
                        told = {"version": weights.version, "checksum": weights.checksum}
                        await self.socket.send_bytes(encode(Loaded(**told, fetch_s=0.0, load_s=0.0)))
                        self.serving.set()
                    elif isinstance(frame, Assign):
                        self.take(frame)
            finally:
                growing.cancel()

    def take(self, frame: Any) -> None:
        now = time.monotonic()
        prompts = {prompt.request_id: prompt.tokens for prompt in frame.prompts}
        loop = asyncio.get_running_loop()
        for work in frame.work:
            number = int.from_bytes(prompts[work.request_id][-4:], "little") - FIRST_MEASURED
            if number < 0:
                self.held[work.row] = (work.lease, len(work.prior) // 4)
            else:
                self.arrived[number] = now
                loop.call_later(self.engine_s, self.end, number, work.row, work.lease)
        self._came.set()

    def end(self, number: int, row: int, lease: int) -> None:
        from gyre.rollouts.protocol.progress import End

        self.ended[number] = time.monotonic()
        report = asyncio.create_task(self.report([(row, lease, 0)], [End(row, lease, "stop", "", ())]))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def grow(self) -> None:
        """A token for some of those that stay, so that each has one a minute or so."""
        while True:
            await asyncio.sleep(self.interval_s)
            rows = sorted(self.held)[: max(1, len(self.held) // 50)]
            told = []
            for row in rows:
                lease, length = self.held.pop(row)
                self.held[row] = (lease, length + 1)
                told.append((row, lease, length))
            if told:
                await self.report(told, [])

    async def report(self, told: list[tuple[int, int, int]], ends: list[Any]) -> None:
        from gyre.rollouts.protocol.codec import encode
        from gyre.rollouts.protocol.progress import GenerationProgress

        self._seq += 1
        count = len(told)
        frame = GenerationProgress(
            self._seq,
            np.array([row for row, _, _ in told], np.uint32),
            np.array([lease for _, lease, _ in told], np.uint64),
            np.array([start for _, _, start in told], np.uint32),
            np.ones(count, np.uint32),
            np.zeros(count, np.int32),
            np.ones(count, np.int32),
            np.full(count, -0.5, np.float32),
            ends,
        )
        await self.socket.send_bytes(encode(frame))


async def serve_instance(options: dict[str, Any]) -> None:
    """It says when it serves, when it has all requests that stay, and at its end what it measured."""
    from gyre.malloc_tuning import calm_collector

    instance = Instance(options["url"], options["engine_s"], 0.25)
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(instance.run(session))
        await asyncio.wait_for(instance.serving.wait(), 60)
        print("serves", flush=True)
        await asyncio.wait_for(instance.has(options["open"]), 60)
        calm_collector()  # to look through what a thousand open requests are made of is not the door's time
        print("has them", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    print(json.dumps([list(instance.arrived.items()), list(instance.ended.items())]), flush=True)


# -- the clients ------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, url: str, request_id: str, prompt: list[int]) -> dict[str, Any]:
    """Ask, and return what the answer says of itself."""
    body = {"rid": request_id, "input_ids": prompt, "sampling_params": {"max_new_tokens": 4096}}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with session.post(f"{url}/generate", json=body, headers=headers) as reply:
        told = await reply.json()
        if reply.status != 200:
            raise SystemExit(f"the answer of {request_id} is {reply.status}: {told}")
    meta: dict[str, Any] = told["meta_info"]
    return meta


async def measure(port: int, options: dict[str, Any], *, has_instance: bool) -> dict[str, Any]:
    from gyre.malloc_tuning import calm_collector

    url = f"http://127.0.0.1:{port}"
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session,
        contextlib.AsyncExitStack() as stack,
    ):
        instance = None
        if has_instance:
            await publish(session, url, Path(options["folder"]))
            instance = stack.enter_context(serving("instance", {**options, "url": url}))
            await said_by(instance, "serves")
        staying = [
            asyncio.create_task(ask(session, url, f"open-{at}", [*PROMPT, at]))
            for at in range(options["open"])
        ]
        if instance is not None:
            await said_by(instance, "has them")
        calm_collector()
        asked: dict[int, tuple[float, float]] = {}
        arrived: dict[int, float] = {}
        finished: dict[int, float] = {}
        ended: list[asyncio.Task[None]] = []

        async def one(number: int) -> None:
            began = time.monotonic()
            prompt = [*PROMPT, FIRST_MEASURED + number]
            told = await ask(session, url, f"measured-{number}", prompt)
            asked[number] = (began, time.monotonic())
            if instance is None:
                arrived[number], finished[number] = told["arrived"], told["ended"]

        begins = time.monotonic()
        for at in range(int(options["rate"] * (options["seconds"] + 1))):
            await asyncio.sleep(max(0.0, begins + at / options["rate"] - time.monotonic()))
            ended.append(asyncio.create_task(one(at)))
        await asyncio.gather(*ended)
        for task in staying:
            task.cancel()
        await asyncio.gather(*staying, return_exceptions=True)
        if instance is not None:
            arrived, finished = await measured_by(instance)
    took: list[tuple[float, float, float]] = []
    for number, (began, there) in asked.items():
        if number < options["rate"]:  # the first second warms up
            continue
        way_in, way_out = arrived[number] - began, there - finished[number]
        took.append((way_in, way_out, way_in + way_out))
    ways, values = ("in", "out", "added"), np.array(took) * 1e3
    return {
        "n": len(took),
        **{
            f"{way}_{name}_ms": float(np.quantile(values[:, at], q))
            for at, way in enumerate(ways)
            for name, q in (("p50", 0.5), ("p99", 0.99))
        },
    }


async def said_by(child: subprocess.Popen[str], expected: str) -> None:
    assert child.stdout is not None
    said = await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), 60)
    if said.strip() != expected:
        raise SystemExit(f"the instance said {said!r} instead of {expected!r}")


async def measured_by(instance: subprocess.Popen[str]) -> list[dict[int, float]]:
    """When the samples came, and ended, by number; the instance ends."""
    said, _ = await asyncio.to_thread(instance.communicate, timeout=60)
    return [dict(times) for times in json.loads(said)]


async def publish(session: aiohttp.ClientSession, url: str, folder: Path) -> None:
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(bytes(8))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    told = {"version": 0, "path": str(weights)}
    async with session.post(f"{url}/v1/policies", json=told, headers=headers) as reply:
        if reply.status != 200:
            raise SystemExit(f"the policy was refused: {await reply.text()}")


@contextlib.contextmanager
def serving(part: str, options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process of this file, which ends when its stdin does."""
    under = options["under"] if part == "door" else []
    child = subprocess.Popen(
        [*under, sys.executable, __file__, "--serve", part, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None
    try:
        yield child
    finally:
        child.stdin.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def run(part: str, options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=options["at"]) as folder:
        told = {**options, "folder": folder}
        with serving(part, told) as child:
            assert child.stdout is not None
            return asyncio.run(measure(int(child.stdout.readline()), told, has_instance=part != "direct"))


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        options = json.loads(sys.argv[3])
        serve = {
            "door": serve_door,
            "direct": serve_direct,
            "relay": serve_relay,
            "instance": serve_instance,
        }[sys.argv[2]]
        asyncio.run(serve(options))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--open", type=int, default=1000, help="requests that stay open")
    parser.add_argument("--rate", type=float, default=100.0, help="measured requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine-s", type=float, default=0.2)
    parser.add_argument(
        "--urgent-commit-s",
        type=float,
        help="how long an end waits to be committed with others, if not the default",
    )
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--folder", help="where the SQLite file goes (default: a temporary folder)")
    parser.add_argument("--profile", help="py-spy's output, of the manager")
    parser.add_argument("--dry-run", action="store_true", help="few requests, to see that it runs")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.dry_run:
        asked.open, asked.rate, asked.seconds, asked.runs = 20, 20.0, 1.0, 1
    options = {
        "open": asked.open,
        "rate": asked.rate,
        "seconds": asked.seconds,
        "engine_s": asked.engine_s,
        "urgent_commit_s": asked.urgent_commit_s,
        "at": asked.folder,
        "under": ["py-spy", "record", "-o", asked.profile, "--"] if asked.profile else [],
    }
    results: dict[str, Any] = {
        "command": " ".join(["python", "bench/door.py", *sys.argv[1:]]),
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        },
        "load_before": os.getloadavg()[0],
    }
    for part in [asked.part] if asked.part else PARTS:
        runs = [run(part, options) for _ in range(asked.runs)]
        results[part] = runs
        for way in ("in", "out", "added"):
            figures = []
            for name in ("p50", "p99"):
                values = [one[f"{way}_{name}_ms"] for one in runs]
                figures.append(
                    f"{name} {statistics.median(values):.2f} ms ({min(values):.2f} to {max(values):.2f})"
                )
            print(f"{part:8} {way:6} {'  '.join(figures)}  of {len(runs)} runs", flush=True)
    results["load_after"] = os.getloadavg()[0]
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
