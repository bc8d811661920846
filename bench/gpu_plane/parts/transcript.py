"""The part that records raw replies of an engine, for tests that have no GPU."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
from gpu_plane.bench import Bench
from gpu_plane.engine_command import API_KEY
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.scale import workload


class Transcript(Bench):
    """Part `transcript`."""

    def transcript(self, out: Row, until: float) -> None:
        instance = self.instances.get("a")
        if instance is None:
            raise PartFailed("there is no engine")
        url = instance.engine_url()
        lines: list[Row] = []
        try:
            asyncio.run(self._record(url, lines, until))
        finally:
            with open(self.out / "transcript.jsonl", "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        out["lines"] = len(lines)
        out["statuses"] = [[line["what"], line.get("status"), line["seconds"]] for line in lines]

    async def _record(self, url: str, lines: list[Row], until: float) -> None:
        began, scale = now(), self.scale
        prompt = workload(scale, 77, 1)[0].prompt.tolist()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {API_KEY}"},
            timeout=aiohttp.ClientTimeout(total=30),
        )

        async def call(what: str, method: str, path: str, body: Row | None = None) -> Any:
            at = now()
            line: Row = {
                "what": what,
                "at": round(at - began, 4),
                "method": method,
                "path": path,
                "request": body,
            }
            lines.append(line)
            try:
                async with session.request(method, url + path, json=body) as response:
                    line["status"] = response.status
                    line["content_type"] = response.content_type
                    line["body"] = (await response.text())[:60_000]
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                line["error"] = repr(error)
            line["seconds"] = round(now() - at, 4)
            return line.get("body")

        async def stream(what: str, rid: str, **changes: Any) -> None:
            sampling = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True, **changes}
            body = {
                "rid": rid,
                "input_ids": prompt,
                "sampling_params": sampling,
                "stream": True,
                "return_logprob": True,
            }
            at = now()
            line: Row = {
                "what": what,
                "at": round(at - began, 4),
                "method": "POST",
                "path": "/generate",
                "request": body,
                "events": [],
            }
            lines.append(line)
            try:
                async with session.post(url + "/generate", json=body) as response:
                    line["status"] = response.status
                    line["content_type"] = response.content_type
                    async for raw in response.content:
                        if raw.strip():
                            line["events"].append(
                                [round(now() - at, 4), raw.decode(errors="replace").rstrip("\n")]
                            )
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                line["error"] = repr(error)
            line["seconds"] = round(now() - at, 4)

        def rid(number: int) -> str:
            return f"{number:020d}"

        try:
            async with asyncio.timeout(until - now()):
                for path in ("/model_info", "/server_info", "/ready", "/health", "/v1/loads", "/nowhere"):
                    await call(path, "GET", path)
                await stream("sampled", rid(1))
                await stream("greedy", rid(2), temperature=0.0)
                await stream("seeded", rid(3), sampling_seed=7)
                await stream("seeded again", rid(4), sampling_seed=7)
                await stream("top_p, top_k, min_p", rid(5), top_p=0.9, top_k=20, min_p=0.01)
                await stream("stop token", rid(6), stop_token_ids=list(range(scale.shape["vocab"] // 2)))
                await stream("one token", rid(7), max_new_tokens=1)
                await stream("unknown sampling parameter", rid(8), nonsense=1)
                await stream("too long", rid(9), max_new_tokens=1_000_000)
                await call("abort of nobody", "POST", "/abort_request", {"rid": rid(99)})
                many = scale.running // 2
                for mode in ("in_place", "retract", "abort"):
                    long = scale.new * 6
                    base = 1000 * (1 + ("abort", "retract", "in_place").index(mode))
                    running = [
                        asyncio.create_task(
                            stream(
                                f"running, {mode}",
                                rid(base + number),
                                max_new_tokens=long,
                                sampling_seed=number,
                            )
                        )
                        for number in range(many)
                    ]
                    await asyncio.sleep(1.0)
                    await call("load while running", "GET", "/v1/loads")
                    await call("abort of one", "POST", "/abort_request", {"rid": rid(base)})
                    await call(f"pause {mode}", "POST", "/pause_generation", {"mode": mode})
                    await call("ready while paused", "GET", "/ready")
                    body = {
                        "model_path": str(self.models[1]),
                        "weight_version": f"9{base}",
                        "flush_cache": mode == "abort",  # 0.5.17 dies of it where a request waits
                    }
                    await call(f"update, {mode}", "POST", "/update_weights_from_disk", body)
                    await call(f"flush while paused, {mode}", "POST", "/flush_cache", {})
                    await call(f"resume, {mode}", "POST", "/continue_generation", {})
                    await asyncio.sleep(0.5)
                    if mode == "in_place":
                        await asyncio.wait(running, timeout=8.0)
                    await call("abort of all", "POST", "/abort_request", {"rid": "", "abort_all": True})
                    await asyncio.wait(running, timeout=10.0)
                    for task in running:
                        task.cancel()
                await call(
                    "update from nowhere",
                    "POST",
                    "/update_weights_from_disk",
                    {"model_path": "/nonexistent", "weight_version": "1", "flush_cache": True},
                )
                await call("model_info after", "GET", "/model_info")
                await call("flush", "POST", "/flush_cache", {})
        finally:
            await session.close()
            _thin(lines)


def _thin(lines: list[Row]) -> None:
    """Of the many streams that ran during a pause, keep three whole, and of the others how they ended."""
    kept: Counter[str] = Counter()
    for line in lines:
        if line["what"].startswith("running"):
            kept[line["what"]] += 1
            if kept[line["what"]] > 3:
                line["request"] = {"rid": line["request"]["rid"]}
                line["events"] = line["events"][-2:]
