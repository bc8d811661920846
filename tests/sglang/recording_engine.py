"""An engine behind a recorder: it starts the engine's own command on another port, hands on what comes and what is
answered, and writes what went by.

    python recording_engine.py LOG HOST PORT COMMAND [ARGUMENT ...]

`{inner}` in the command is the engine's port. It ends when the engine does. Each line of LOG is a JSON list:

    ["asked", rid, input_ids]           a request of /generate, as the engine got it
    ["drew", rid, ids, logprobs]        an event of its stream, as the engine said it
    ["ended", rid, kind]                its end: stop, length or abort
    ["called", path]                    whatever else was asked
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any, TextIO

import aiohttp
from aiohttp import web

HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding"}
"""Headers that are a connection's own."""


class Recorder:
    def __init__(self, log: TextIO, inner: str) -> None:
        self._log, self._inner = log, inner
        self._client: aiohttp.ClientSession | None = None

    def note(self, *what: Any) -> None:
        self._log.write(json.dumps(what) + "\n")
        self._log.flush()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        body = await request.read()
        rids: list[str] = []
        if request.path == "/generate":
            rids = self._asked(json.loads(body))
        elif request.method == "POST":
            self.note("called", request.path)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        async with self._client.request(
            request.method, self._inner + request.path_qs, data=body, headers=headers
        ) as answer:
            told = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=told)
            await response.prepare(request)
            kept = b""
            async for part in answer.content.iter_any():
                if rids:
                    *lines, kept = (kept + part).split(b"\n")
                    for line in lines:  # written down before it is handed on
                        self._said(line, rids)
                await response.write(part)
            await response.write_eof()
            return response

    def _asked(self, body: dict[str, Any]) -> list[str]:
        rids, prompts = body["rid"], body["input_ids"]
        if isinstance(rids, str):
            rids, prompts = [rids], [prompts]
        for rid, ids in zip(rids, prompts, strict=True):
            self.note("asked", rid, ids)
        return list(rids)

    def _said(self, line: bytes, rids: list[str]) -> None:
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "meta_info" not in event:
            return
        rid, meta = rids[event.get("index", 0)], event["meta_info"]
        told = meta.get("output_token_logprobs") or []
        if ids := event.get("output_ids") or []:
            assert [one[1] for one in told[-len(ids) :]] == ids, "log-probs are of other tokens"
            self.note("drew", rid, ids, [one[0] for one in told[-len(ids) :]])
        if finish := meta.get("finish_reason"):
            self.note("ended", rid, finish["type"])


async def main(log: str, host: str, port: int, command: list[str]) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        inner = free.getsockname()[1]
    engine = await asyncio.create_subprocess_exec(*(part.replace("{inner}", str(inner)) for part in command))
    with open(log, "a") as file:  # noqa: ASYNC230
        recorder = Recorder(file, f"http://127.0.0.1:{inner}")
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", recorder.handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return await engine.wait()


if __name__ == "__main__":
    ended = asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
    sys.exit(ended if ended >= 0 else 128 - ended)
