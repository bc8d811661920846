"""The measured process of `bench/turns.py`, pinned to one core: the real rollout manager of a job with agents, or a
bare aiohttp server that reads the same requests, waits as long as the engine draws, and answers as many tokens.

It says its port, and answers each line on stdin with the seconds of its core that it has used.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


async def manager(options: dict[str, Any]) -> None:
    from gyre.malloc_tuning import calm_collector
    from gyre.rollouts.manager.rollout_manager import RolloutManager
    from gyre.rollouts.manager.shell import HearsOfPlane
    from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings
    from gyre.store import open_store

    class Owner(HearsOfPlane):
        def event(self, kind: str, fields: dict[str, Any]) -> None:
            if kind not in ("InstanceJoined", "WeightsLoaded", "PolicyServed", "SamplesMoved"):
                print(kind, str(fields)[:300], file=sys.stderr, flush=True)

        def fail(self, error: BaseException) -> None:
            traceback.print_exception(error)
            os._exit(1)

    store = open_store(f"sqlite:///{options['folder']}/gyre.db")
    store.create_job(job_id="bench", name="bench", spec={}, now=time.time())
    sessions = SessionSettings(max_turns=options["turns"] + 1, max_tokens=1 << 20, seconds=3600.0)
    writes: list[float] = []
    made = RolloutManager(
        store.rollouts("bench"),
        term=1,
        token="bench",
        settings=ManagerSettings(sessions=sessions, silence_timeout_s=60.0),
        owner=Owner(),
    )
    write = made.shell.commits._write

    def timed(batch: Any) -> None:
        began = time.monotonic()
        write(batch)
        writes.append(time.monotonic() - began)

    made.shell.commits._write = timed
    calm_collector()
    port = await made.start("127.0.0.1", 0)
    await answer_lines(port, lambda: {"writes": len(writes), "write_s": sum(writes)})
    told = {"missing_tokens": made.groups.missing_tokens()}
    await made.stop()
    store.close()
    print(json.dumps(told), flush=True)


async def bare(options: dict[str, Any]) -> None:
    from gyre.malloc_tuning import calm_collector

    low, high = options["tokens"]
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode

    async def generate(request: web.Request) -> web.Response:
        arrived = time.monotonic()
        ids = decode(await request.read())["token_ids"]
        count = low + ids[0] * 7919 % (high - low)
        await asyncio.sleep(count / options["rate"])
        ended = time.monotonic()
        entries = [{"token": f"token_id:{one}", "logprob": -0.5} for one in range(count)]
        choice = {"token_ids": list(range(count)), "logprobs": {"content": entries}}
        told = {"choices": [choice], "arrived": arrived, "ended": ended}
        return web.Response(body=encode(told), content_type="application/json")

    application = web.Application(client_max_size=1 << 26)
    application.add_routes([web.post("/inference/v1/generate", generate)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    calm_collector()
    await answer_lines(runner.addresses[0][1], dict)
    await runner.cleanup()
    print(json.dumps({}), flush=True)


async def answer_lines(port: int, more: Any) -> None:
    """Until stdin ends."""
    print(json.dumps({"port": port}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        told = {"cpu_s": used.ru_utime + used.ru_stime, "rss_mib": used.ru_maxrss / 1024, **more()}
        print(json.dumps(told), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    if options["core"] is not None:
        os.sched_setaffinity(0, {options["core"]})
    asyncio.run({"manager": manager, "bare": bare}[options["what"]](options))


if __name__ == "__main__":
    main()
