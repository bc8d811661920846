"""Writes what the real SGLang says into `tests/engines/recorded`, for tests that run without it.

    .venv/bin/python -m tests.sglang.record .venv-sglang/bin/python
    .venv/bin/python -m tests.sglang.record PYTHON-WITH-SGLANG-0.5.17 0.5.17

The second writes what SGLang 0.5.17 says otherwise than 0.5.23.

`stream_*.json` hold the events of one `/generate`, byte for byte, and the tokens that they must be read as: greedy
ones, from a request of its own that was not disturbed. `reply_*.json` hold the pages of one call of the client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from gyre.engines.process import EngineProcess
from tests.engines.tiny_model import CONTEXT, write_tiny_model
from tests.sglang_cpu import sglang_on_cpu

RECORDED = Path(__file__).parents[1] / "engines" / "recorded"
NEWEST = "0.5.23"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

SERVER_INFO = (
    "model_path",
    "context_length",
    "max_req_input_len",
    "max_total_num_tokens",
    "status",
    "version",
)
"""What is kept of the forty kilobytes of `/server_info`."""


class Recorder:
    def __init__(self, url: str, session: aiohttp.ClientSession, suffix: str, version: str) -> None:
        self.url, self.session, self.suffix, self.version = url, session, suffix, version

    def body(self, rid: str, count: int, **sampling: Any) -> dict[str, Any]:
        params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True, "stream_interval": 4}
        return {
            "rid": rid.ljust(32, "0"),
            "input_ids": PROMPT,
            "sampling_params": params | sampling,
            "stream": True,
            "return_logprob": True,
        }

    async def post(self, path: str, body: dict[str, Any]) -> None:
        async with self.session.post(self.url + path, json=body) as response:
            await response.read()
            response.raise_for_status()

    async def events(self, body: dict[str, Any], into: list[str] | None = None) -> list[str]:
        events = [] if into is None else into
        async with self.session.post(self.url + "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.strip():
                    events.append(line.decode().rstrip("\n") + "\n\n")
        return events

    async def undisturbed(self, count: int) -> list[int]:
        body = self.body("plain", count) | {"stream": False}
        async with self.session.post(self.url + "/generate", json=body) as response:
            return list((await response.json())["output_ids"])

    def keep_stream(
        self,
        name: str,
        body: dict[str, Any],
        events: list[str],
        tokens: list[int] | None,
        error: str = "",
        finish: str = "",
    ) -> None:
        """`finish` is what it must be read as, where that is not what it says."""
        expected: dict[str, Any] = {"error": error}
        if tokens is not None:
            meta = json.loads(events[-2].removeprefix("data: "))["meta_info"]
            expected = {
                "tokens": tokens[: meta["completion_tokens"]],
                "finish": finish or meta["finish_reason"]["type"],
                "spans": [
                    [span["version"], span["start"], span["end"]]
                    for span in meta.get("weight_versions", ())
                    if span["end"] > span["start"]
                ],
            }
        self._write(f"stream_{name}{self.suffix}", {"request": body, "events": events, "expected": expected})

    async def keep_reply(
        self, name: str, call: str, pages: list[tuple[str, str, Any]], error: str | None = None
    ) -> None:
        kept = []
        for method, path, body in pages:
            async with self.session.request(method, self.url + path, json=body) as response:
                text = await response.text()
                if path == "/server_info":
                    text = json.dumps(
                        {key: value for key, value in json.loads(text).items() if key in SERVER_INFO}
                    )
                kept.append(
                    {
                        "path": path,
                        "status": response.status,
                        "content_type": response.headers.get("Content-Type", "").partition(";")[0],
                        "body": text,
                    }
                )
        self._write(f"reply_{name}", {"call": call, "pages": kept, "error": error})

    def _write(self, name: str, what: dict[str, Any]) -> None:
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{name}.json").write_text(
            json.dumps({"server": f"SGLang {self.version}", **what}, indent=1) + "\n"
        )
        print(name, flush=True)

    async def disturbed(
        self, name: str, count: int, *steps: tuple[str, dict[str, Any]] | float, whole: bool
    ) -> None:
        """A stream, and what is posted when it has begun; a number is seconds to wait."""
        tokens = await self.undisturbed(count)
        body = self.body(name, count)
        events: list[str] = []
        task = asyncio.create_task(self.events(body, events))
        while True:
            await asyncio.sleep(0.005)
            if len(events) >= 3:
                break
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                await self.post(*step)
        await task
        if whole:  # the weights changed: nobody else can say what the tokens are
            tokens = [
                t for event in events[:-1] for t in json.loads(event.removeprefix("data: "))["output_ids"]
            ]
        self.keep_stream(name, body, events, tokens)


async def record_streams(at: Recorder) -> None:
    body = at.body("plain", 14)
    at.keep_stream("plain", body, await at.events(body), await at.undisturbed(14))
    tokens = await at.undisturbed(14)
    body = at.body("stop", 14, ignore_eos=False, stop_token_ids=[tokens[9]])
    at.keep_stream("stop", body, await at.events(body), tokens)
    rid = {"rid": at.body("abort", 1)["rid"]}
    await at.disturbed("abort", 800, ("/abort_request", rid), whole=False)
    rid = {"rid": at.body("abort_retracted", 1)["rid"]}
    await at.disturbed(
        "abort_retracted",
        800,
        ("/pause_generation", {"mode": "retract"}),
        1.0,  # an abort while there are unsent tokens breaks the stream (SGLang 0.5.23)
        ("/abort_request", rid),
        ("/continue_generation", {}),
        whole=False,
    )


async def record_stop_at_limit(at: Recorder) -> None:
    """A stop token that is the last token which the request allows: 0.5.17 ends it by `length`."""
    tokens = await at.undisturbed(10)
    stop = tokens[-1]
    assert stop not in tokens[:-1]
    body = at.body("stop_at_limit", 10, ignore_eos=False, stop_token_ids=[stop])
    events = await at.events(body)
    assert json.loads(events[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "length"
    at.keep_stream("stop_at_limit", body, events, tokens, finish="stop")


async def record_rest(at: Recorder, second: Path, first: Path) -> None:
    update = {"model_path": str(second), "weight_version": "2", "flush_cache": False}
    await at.disturbed(
        "update_in_place",
        60,
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", update),
        ("/continue_generation", {}),
        whole=True,
    )
    back = {"model_path": str(first), "weight_version": "1", "flush_cache": True}
    await at.post("/update_weights_from_disk", back)
    body = at.body("too_long", 4) | {"input_ids": [1] * (CONTEXT + 1)}
    events = await at.events(body)
    at.keep_stream("too_long", body | {"input_ids": "too many"}, events, None, error="engine.refused")

    post = "POST"
    await at.keep_reply("load", "load", [("GET", "/v1/loads", None)])
    await at.keep_reply("info", "info", [("GET", "/model_info", None), ("GET", "/server_info", None)])
    await at.keep_reply("abort", "abort", [(post, "/abort_request", {"rid": "nobody"})])
    await at.keep_reply("pause", "pause", [(post, "/pause_generation", {"mode": "retract"})])
    await at.keep_reply("resume", "resume", [(post, "/continue_generation", {})])
    await at.keep_reply("flush_cache", "flush_cache", [(post, "/flush_cache", {})])
    await at.keep_reply("update", "update", [(post, "/update_weights_from_disk", back)])
    absent = {"model_path": "/nowhere", "weight_version": "3"}
    await at.keep_reply(
        "update_absent", "update", [(post, "/update_weights_from_disk", absent)], "engine.refused"
    )
    unknown = at.body("unknown", 4, temprature=1.0)
    await at.keep_reply("unknown_key", "generate", [(post, "/generate", unknown)], "engine.refused")


async def main(python: str, version: str) -> None:
    newest = version == NEWEST
    with tempfile.TemporaryDirectory() as folder:
        first = write_tiny_model(Path(folder) / "first", seed=1)
        second = write_tiny_model(Path(folder) / "second", seed=2)
        command = sglang_on_cpu(first, python=python, weight_version="1", deterministic=newest)
        cumulative = [part for part in command.argv if part != "--incremental-streaming-output"]
        for suffix, asked in (
            ("", command),
            ("_cumulative", replace(command, argv=tuple(cumulative))),
        ):
            async with (
                EngineProcess(asked, ready_within_s=240, stop_within_s=1) as engine,
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {command.api_key}"}) as session,
            ):
                at = Recorder(engine.url, session, suffix, version)
                try:
                    if not newest:
                        await record_stop_at_limit(at)
                        continue
                    await record_streams(at)
                    if not suffix:
                        await record_rest(at, second, first)
                except BaseException:
                    print(engine.tail[-5000:], file=sys.stderr)
                    raise


if __name__ == "__main__":
    asyncio.run(main(str(Path(sys.argv[1]).absolute()), *(sys.argv[2:] or [NEWEST])))
