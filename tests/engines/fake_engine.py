"""An engine in this process that says what a test tells it to say, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


class Cut:
    """In a script: the connection breaks here."""


class Silence:
    """In a script: nothing more is said, and the connection stays."""


@dataclass(frozen=True)
class Pause:
    seconds: float


Script = Sequence[bytes | Pause | type[Cut] | type[Silence]]


@dataclass
class Reply:
    """To one path: a whole body, or for a stream the parts of one."""

    body: Any = b""
    status: int = 200
    script: Script | None = None
    content_type: str = "application/json"
    silent: bool = False
    """Accept the request and never answer."""
    cuts: int = 0
    """Break the connection so many times before the first answer."""


@dataclass
class FakeEngine:
    """Answers each path with its `Reply`, and remembers what it was asked."""

    replies: dict[str, Reply] = field(default_factory=dict)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client closed a stream before its end."""
    connections: set[Any] = field(default_factory=set)
    url: str = ""

    def streams(self, *script: bytes | Pause | type[Cut] | type[Silence]) -> None:
        """What `/generate` says."""
        self.replies["/generate"] = Reply(script=script)

    async def __aenter__(self) -> FakeEngine:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.asked.append((request.method, request.path, json.loads(raw) if raw else None))
        self.connections.add(request.transport)
        reply = self.replies.get(request.path, Reply(b"", 404))
        if reply.silent:
            await asyncio.sleep(3600)
        if reply.cuts:
            reply.cuts -= 1
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(3600)
        if reply.script is not None:
            return await self._stream(request, reply.script)
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        return web.Response(body=body, status=reply.status, content_type=reply.content_type)

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            for part in script:
                if isinstance(part, bytes):
                    await response.write(part)
                elif isinstance(part, Pause):
                    await asyncio.sleep(part.seconds)
                elif part is Cut:
                    assert request.transport is not None
                    request.transport.abort()
                else:
                    await asyncio.sleep(3600)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response


def event(
    ids: Sequence[Any],
    total: int,
    *,
    finish: dict[str, Any] | None = None,
    logprobs: Sequence[Any] | None = None,
    **meta: Any,
) -> bytes:
    """One event of a stream, as SGLang writes it. The log-prob of token t is -|t|/64 unless it is given."""
    values = [-abs(token) / 64 for token in ids] if logprobs is None else logprobs
    body = {
        "output_ids": list(ids),
        "meta_info": {
            "id": "r",
            "finish_reason": finish,
            "prompt_tokens": 3,
            "weight_version": "1",
            "completion_tokens": total,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(values, ids, strict=False)
            ],
            "output_token_logprobs_length": total,
        }
        | meta,
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
LENGTH = {"type": "length", "length": 6}
