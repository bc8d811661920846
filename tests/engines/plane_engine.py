"""A fake engine for tests of the agent: a process that speaks SGLang's dialect without torch, and starts at once.

    python plane_engine.py --model-path DIR --port N --weight-version V [--delay S] [--fail N]

Its tokens are a hash of everything before them, of the seed and of the weights' bytes, so that whoever goes on from
somewhere gives the same. It does what files in the folder `--say DIR` tell it: `die` kills it, `hang` makes it
silent, `fail` makes every request a 500, `hold` has a number in it and holds each sample once it is so long.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web


class Engine:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.say = Path(asked.say)
        self.version = asked.weight_version
        self.weights = self.read(asked.model_path)
        self.running: dict[str, asyncio.Event] = {}
        self.paused = False
        self.adapters: dict[str, int] = {}

    @staticmethod
    def read(path: str) -> int:
        return zlib.crc32((Path(path) / "model.safetensors").read_bytes())

    def told(self, word: str) -> bool:
        return (self.say / word).exists()

    def stands(self) -> bool:
        return self.paused or self.told("hang")

    def holds(self, length: int) -> bool:
        try:
            return length >= int((self.say / "hold").read_text())
        except FileNotFoundError:
            return False

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if self.told("fail"):
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        many = isinstance(body["rid"], list)
        rids, prompts, params = (
            [body[key]] if not many else body[key] for key in ("rid", "input_ids", "sampling_params")
        )
        named = body.get("lora_path") or ""
        adapters = named if isinstance(named, list) else [named] * len(rids)
        if unknown := [one for one in adapters if one and one not in self.adapters]:
            return web.json_response({"error": {"message": f"no adapter {unknown[0]}"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        streams = [
            self.stream(response, at if many else None, rid, list(ids), sampling, self.adapters.get(one, 0))
            for at, (rid, ids, sampling, one) in enumerate(zip(rids, prompts, params, adapters, strict=True))
        ]
        await asyncio.gather(*streams)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def stream(
        self,
        response: web.StreamResponse,
        at: int | None,
        rid: str,
        ids: list[int],
        sampling: dict[str, Any],
        adapter: int,
    ) -> None:
        aborted = self.running[rid] = asyncio.Event()
        total = 0
        try:
            while True:
                await asyncio.sleep(self.asked.delay)
                while self.stands() or (self.holds(len(ids)) and not aborted.is_set()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                finish: dict[str, Any] | None = None
                new: list[int] = []
                if aborted.is_set():
                    finish = {"type": "abort", "message": "aborted"}
                else:
                    state = f"{ids}{sampling['sampling_seed']}{self.weights}{adapter or ''}".encode()
                    new = [zlib.crc32(state) % 30_000]
                    ids += new
                    total += 1
                    if total >= sampling["max_new_tokens"]:
                        finish = {"type": "length", "length": total}
                event = {
                    "output_ids": new,
                    "meta_info": {
                        "id": rid,
                        "finish_reason": finish,
                        "prompt_tokens": 1,
                        "weight_version": self.version,
                        "completion_tokens": total,
                        "output_token_logprobs": [[-(token % 64) / 64, token, None] for token in new],
                        "output_token_logprobs_length": total,
                    },
                }
                if at is not None:
                    event["index"] = at
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
                if finish is not None:
                    return
        finally:
            self.running.pop(rid, None)

    async def abort(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if self.told("hang"):
            await asyncio.sleep(3600)
        for rid, event in self.running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                event.set()
        return web.json_response({})

    async def pause(self, request: web.Request) -> web.Response:
        self.paused = True
        with open(self.say / "modes", "a") as file:  # noqa: ASYNC230
            file.write(orjson.loads(await request.read())["mode"] + "\n")
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if self.told("no_update"):
            return web.json_response({"error": {"message": "broken"}}, status=500)
        self.weights, self.version = self.read(body["model_path"]), body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        name = body["lora_name"]
        problem = "it is there already" if name in self.adapters else "full" if self.told("no_load") else ""
        if not problem:
            self.adapters[name] = self.read(body["lora_path"])
            self.note(f"load {name}")
        body = {"success": not problem, "error_message": problem}
        return web.json_response(body, status=400 if problem else 200)

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = orjson.loads(await request.read())["lora_name"]
        del self.adapters[name]
        self.note(f"unload {name}")
        return web.json_response({"success": True})

    def note(self, text: str) -> None:
        with open(self.say / "adapters", "a") as file:
            file.write(text + "\n")

    async def flush(self, _: web.Request) -> web.Response:
        if self.running and self.told("no_flush"):  # as SGLang 0.5.17 while requests wait
            return web.Response(status=400, text="pending requests")
        with open(self.say / "modes", "a") as file:  # noqa: ASYNC230
            file.write("flush\n")
        return web.Response(text="Cache flushed.")

    async def ready(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.asked.model_path, "weight_version": self.version})

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            if self.told("die"):
                (self.say / "die").unlink(missing_ok=True)
                print("last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


async def main(asked: argparse.Namespace) -> None:
    engine = Engine(asked)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.post("/abort_request", engine.abort),
            web.post("/pause_generation", engine.pause),
            web.post("/continue_generation", engine.resume),
            web.post("/update_weights_from_disk", engine.update),
            web.post("/flush_cache", engine.flush),
            web.post("/load_lora_adapter", engine.load_adapter),
            web.post("/unload_lora_adapter", engine.unload_adapter),
            web.get("/ready", engine.ready),
            web.get("/model_info", engine.ready),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, asked.host, asked.port).start()
    print(f"pid {os.getpid()}", flush=True)
    await engine.watch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--delay", type=float, default=0.01)
    parser.add_argument("--say", required=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(main(parser.parse_args()))
