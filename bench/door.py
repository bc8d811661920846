"""What the door of a fleet adds to an engine's own time, at the median and at p99, with many requests open.

    python bench/door.py [--open 1000] [--rate 100] [--seconds 20] [--runs 3] [--dry-run] [--json FILE]

The rollout manager is the real one in a process of its own, with its ledger in SQLite on disk. Its one instance, and
the clients, are in this process; the engine is SIMULATED: it ends each sample after `--engine-s`, at once and whole.
Beside the requests that are measured, the rest of `--open` stay open: each has a token now and then.

    in      from the client's request until the instance has the sample
    out     from the instance's report of its end until the client has the answer: a commit is in it
    added   both together; how often instances report is not in it
    direct  the same client at a bare aiohttp server that answers after the engine's time, with as many requests open:
            what it adds to that
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "bench"
PROMPT = list(range(256))


# -- the measured process ---------------------------------------------------------------------------------


async def serve_door(options: dict[str, Any]) -> None:
    from gyre.malloc_tuning import calm_collector
    from gyre.rollouts.manager.rollout_manager import RolloutManager
    from gyre.rollouts.manager.settings import DoorSettings, ManagerSettings
    from gyre.store import open_store

    folder = Path(options["folder"])
    store = open_store(f"sqlite:///{folder}/gyre.db")
    store.create_job(job_id="bench", name="bench", spec={}, now=time.time())
    timing = {key: options[key] for key in ("urgent_commit_s",) if options[key] is not None}
    door = DoorSettings(most_open=1 << 20, serves_folders=False, **timing)
    settings = ManagerSettings(
        door=door, silence_timeout_s=60.0
    )  # the instance shares a loop with a thousand clients
    manager = RolloutManager(store.rollouts("bench"), term=1, token=TOKEN, settings=settings)
    calm_collector()
    port = await manager.start("127.0.0.1", 0)
    await _until_told(port)
    await manager.stop()


async def serve_direct(options: dict[str, Any]) -> None:
    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        await asyncio.sleep(3600.0 if asked["rid"].startswith("open-") else options["engine_s"])
        return web.json_response({"output_ids": [1], "meta_info": {"id": asked["rid"]}})

    application = web.Application()
    application.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    await _until_told(runner.addresses[0][1])
    await runner.cleanup()


async def _until_told(port: int) -> None:
    """Say the port, and go on until stdin ends."""
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


# -- the instance -----------------------------------------------------------------------------------------


class Instance:
    """It ends samples of which `at_work` says so after the engine's time, and gives the others a token at times."""

    def __init__(self, url: str, engine_s: float, interval_s: float) -> None:
        self.url = url
        self.engine_s, self.interval_s = engine_s, interval_s
        self.serving = asyncio.Event()
        self.measured: dict[bytes, str] = {}
        """The ids of the requests that are measured, by their prompts."""
        self.arrived: dict[str, float] = {}
        self.ended: dict[str, float] = {}
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
            request_id = self.measured.get(prompts[work.request_id][-4:])
            if request_id is None:
                self.held[work.row] = (work.lease, len(work.prior) // 4)
            else:
                self.arrived[request_id] = now
                loop.call_later(self.engine_s, self.end, request_id, work.row, work.lease)
        self._came.set()

    def end(self, request_id: str, row: int, lease: int) -> None:
        from gyre.rollouts.protocol.progress import End

        self.ended[request_id] = time.monotonic()
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
        from gyre.rollouts.protocol.progress import Progress

        self._seq += 1
        count = len(told)
        frame = Progress(
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


# -- the clients ------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, url: str, request_id: str, prompt: list[int]) -> float:
    """Ask, and return when the answer was there."""
    body = {"rid": request_id, "input_ids": prompt, "sampling_params": {"max_new_tokens": 4096}}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with session.post(f"{url}/generate", json=body, headers=headers) as reply:
        told = await reply.json()
        if reply.status != 200:
            raise SystemExit(f"the answer of {request_id} is {reply.status}: {told}")
    return time.monotonic()


async def measure(port: int, options: dict[str, Any], *, door: bool) -> dict[str, Any]:
    from gyre.malloc_tuning import calm_collector

    url = f"http://127.0.0.1:{port}"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        instance = Instance(url, options["engine_s"], 0.25)
        tasks: list[asyncio.Task[Any]] = []
        if door:
            await publish(session, url, Path(options["folder"]))
            tasks.append(asyncio.create_task(instance.run(session)))
            await asyncio.wait_for(instance.serving.wait(), 60)
        for at in range(options["open"]):
            tasks.append(asyncio.create_task(ask(session, url, f"open-{at}", [*PROMPT, at])))
        if door:
            await asyncio.wait_for(instance.has(options["open"]), 60)
        calm_collector()  # to look through what a thousand open requests are made of is not the door's time
        took: list[tuple[float, float, float]] = []
        ended: list[asyncio.Task[None]] = []

        async def one(at: int) -> None:
            request_id, last = f"measured-{at}", 1_000_000 + at
            instance.measured[np.array([last], "<i4").tobytes()] = request_id
            began = time.monotonic()
            there = await ask(session, url, request_id, [*PROMPT, last])
            if door:
                way_in = instance.arrived[request_id] - began
                way_out = there - instance.ended[request_id]
            else:
                way_in, way_out = 0.0, there - began - options["engine_s"]
            if at >= options["rate"]:  # the first second warms up
                took.append((way_in, way_out, way_in + way_out))

        begins = time.monotonic()
        for at in range(int(options["rate"] * (options["seconds"] + 1))):
            await asyncio.sleep(max(0.0, begins + at / options["rate"] - time.monotonic()))
            ended.append(asyncio.create_task(one(at)))
        await asyncio.gather(*ended)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ways, values = ("in", "out", "added"), np.array(took) * 1e3
    return {
        "n": len(took),
        **{
            f"{way}_{name}_ms": float(np.quantile(values[:, at], q))
            for at, way in enumerate(ways)
            for name, q in (("p50", 0.5), ("p99", 0.99))
        },
    }


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


def run(part: str, options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=options["at"]) as folder:
        told = {**options, "folder": folder}
        child = subprocess.Popen(
            [*options["under"], sys.executable, __file__, "--serve", part, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            return asyncio.run(measure(int(child.stdout.readline()), told, door=part == "door"))
        finally:
            child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        options = json.loads(sys.argv[3])
        asyncio.run(serve_door(options) if sys.argv[2] == "door" else serve_direct(options))
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
    for part in ("direct", "door"):
        runs = [
            run(part, {**options, "under": options["under"] if part == "door" else []})
            for _ in range(asked.runs)
        ]
        results[part] = runs
        for way in ("in", "out", "added") if part == "door" else ("added",):
            figures = []
            for name in ("p50", "p99"):
                values = [one[f"{way}_{name}_ms"] for one in runs]
                figures.append(
                    f"{name} {statistics.median(values):.2f} ms ({min(values):.2f} to {max(values):.2f})"
                )
            told = f", {asked.open} open" if part == "door" else ""
            print(f"{part + told:20} {way:6} {'  '.join(figures)}  of {len(runs)} runs", flush=True)
    results["load_after"] = os.getloadavg()[0]
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
