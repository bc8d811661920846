"""The baselines of `bench/rollouts.py` part a: tokens that are relayed one server-sent event each, and not kept.

`load`: a SIMULATED SGLang server that streams to each request one event a token, as with
`--incremental-streaming-output` and `return_logprob`, and the clients that read it through a relay and count.
`aiohttp`: a relay that passes each event on, on aiohttp; it looks at none of them.

Started as `relays.py load|aiohttp JSON`; answers one JSON line on stdout to each line on stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plane import lines, say

EVENT = {
    "text": " the",
    "output_ids": [101_234],
    "meta_info": {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": None,
        "prompt_tokens": 256,
        "weight_version": "0",
        "completion_tokens": 1017,
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.12345678, 101_234, None]],
        "output_token_logprobs_length": 1017,
        "e2e_latency": 16.63,
    },
}
BODY = b"data: " + json.dumps(EVENT, separators=(",", ":")).encode() + b"\n\n"
CHUNK = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n"
MARK = b'"output_ids"'

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ABOUT = json.dumps(
    {
        "status": "ok",
        "model_path": "bench",
        "served_model_name": "bench",
        "is_generation": True,
        "weight_version": "0",
    }
).encode()
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(ABOUT),
    ABOUT,
)


class Engine(asyncio.Protocol):
    """One connection to the simulated server."""

    streams: set[asyncio.Transport]

    def __init__(self, streams: set[asyncio.Transport]) -> None:
        self.streams = streams
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(body) < length:
            return
        self.data = body[length:]
        if head.startswith(b"POST /generate"):
            self.transport.write(HEAD)
            self.streams.add(self.transport)
        else:
            self.transport.write(OK)

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.discard(self.transport)


class Client(asyncio.Protocol):
    """Asks for one stream and counts its tokens."""

    tokens = 0
    streaming = 0

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)
        Client.streaming += 1

    def data_received(self, data: bytes) -> None:
        data = self.rest + data
        Client.tokens += data.count(MARK)
        self.rest = data[-len(MARK) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        Client.streaming -= 1


async def load(options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    streams: set[asyncio.Transport] = set()
    server = await loop.create_server(lambda: Engine(streams), "127.0.0.1", 0, backlog=4096)
    say({"port": server.sockets[0].getsockname()[1]})
    body = json.dumps(
        {
            "input_ids": list(range(256)),
            "sampling_params": {"max_new_tokens": 100_000},
            "stream": True,
            "return_logprob": True,
        }
    ).encode()
    head = "POST /generate HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    made = 0

    async def decode() -> None:
        """A step gives each stream a token. A stream that is not read gets none: that is backpressure."""
        nonlocal made
        due = time.monotonic()
        while True:
            for transport in list(streams):
                if transport.get_write_buffer_size() < 1 << 16:
                    transport.write(CHUNK)
                    made += 1
            due = max(due + 1 / options["rate"], time.monotonic() - 0.05)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    clients: list[asyncio.BaseTransport] = []
    decoding = asyncio.create_task(decode())
    began, before, made_before = time.monotonic(), 0, 0
    async for line in lines():
        verb, _, port = line.partition(" ")
        if verb == "stop":
            break
        if verb == "open":
            for number in range(options["streams"]):
                request = head.encode() + body
                transport, _ = await loop.create_connection(
                    lambda r=request: Client(r), "127.0.0.1", int(port)
                )
                clients.append(transport)
                if number % 64 == 63:
                    await asyncio.sleep(0.1)
            say({"streams": len(streams)})
        elif verb == "reset":
            began, before, made_before = time.monotonic(), Client.tokens, made
            say({})
        else:
            seconds = time.monotonic() - began
            say(
                {
                    "tokens": Client.tokens - before,
                    "tokens_s": (Client.tokens - before) / seconds,
                    "made_s": (made - made_before) / seconds,
                    "streams": len(streams),
                    "seconds": seconds,
                }
            )
    decoding.cancel()
    for transport in clients:
        transport.close()
    server.close()
    say({})


async def relay(options: dict[str, Any]) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def route(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(
            aiohttp.ClientError, ConnectionError
        ):  # its end, which these streams do not have
            async with session.post(options["worker"] + "/generate", data=await request.read()) as upstream:
                await response.prepare(request)
                async for line in upstream.content:
                    if line != b"\n":
                        await response.write(line + b"\n")
        return response

    application = web.Application()
    application.add_routes([web.post("/generate", route)])
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    say({"port": int(runner.addresses[0][1])})
    async for line in lines():
        if line == "stop":
            break
    await session.close()
    await runner.cleanup()
    say({})


def main() -> None:
    options = json.loads(sys.argv[2])
    os.sched_setaffinity(0, {options["core"]})
    asyncio.run(load(options) if sys.argv[1] == "load" else relay(options))


if __name__ == "__main__":
    main()
