"""The one way that Gyre talks to an engine: SGLang's HTTP dialect, from asyncio, with a deadline on everything.

Invariants:
- *every wait has a deadline*: each call ends within its part of `Deadlines`; a stream of tokens has no limit in
  total, but ends when no new token comes for `stall_s`;
- *what was yielded stands*: a stream that breaks raises, and the chunks before it are good (`gyre.engines.
  replies` says what a chunk promises). A stream that ends without a finish is an error, never a short sample. What
  had come but was not yet asked for when the connection broke is lost, so ask at once;
- *whatever it sends*: an engine runs other people's code. What it answers is read within bounds of time and memory,
  never decompressed, followed elsewhere or kept as a cookie, and what makes no sense is an EngineError;
- *leaving aborts*: closing the iterator of `generate` early closes its connection, upon which the engine drops the
  request. SGLang notices within about two seconds; `abort` is faster;
- *asked once*: nothing is sent a second time by itself. Who calls decides whether an engine is asked again.

This module must not know about samples' owners, policy versions beyond their text, or the engine's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gyre.engines.dialect import EngineInfo, EngineLoad, GenerateRequest, PauseMode, StreamChunk
from gyre.engines.errors import (
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from gyre.engines.limits import RequestLimits
from gyre.engines.replies import (
    EventLines,
    ManyReader,
    StreamReader,
    generate_body,
    generate_many_body,
    info_of,
    load_of,
    most_event_bytes,
    said_no,
    words_of,
)
from gyre.errors import ConfigError

_IDLE_CONNECTION_S = 2.0
"""Shorter than uvicorn's 5 s: a connection that the server is about to close must not be used for a POST."""

_MOST_REPLY_BYTES = 16 << 20
"""Largest reply that is no stream. SGLang's checksums of a large model take some megabytes."""

_BUFFER_BYTES = 1 << 20
"""Per stream; past it the engine's socket is no longer read, so a slow consumer holds its own engine back."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an engine may take, in seconds, and why."""

    connect_s: float = 5.0
    """Time to accept a connection, which is tried twice. A living machine needs milliseconds; a lost packet is resent
    after 1 s and 3 s."""
    answer_s: float = 10.0
    """Time to answer questions (load, info, readiness) and aborts, which wait for one step of the engine at most."""
    pause_s: float = 60.0
    """Time to pause, resume, or name weights: `abort` waits until the engine is idle, which it looks up once a second;
    after a `retract` a step computes anew what was put back."""
    update_s: float = 600.0
    """Time to load weights: a 70B model in bf16 from a disk of 0.5 GB/s takes 280 s."""
    stall_s: float = 180.0
    """Longest time without a token of a stream, from the request or from a token: a request waits in the queue, and
    while the engine is paused; with a long weight load inside the pause this must be longer than the load."""


class EngineClient:
    """A client of the engine at `url`. `async with`, or `close()`; bound to the event loop of its first call."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadlines: Deadlines | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        """Requests beyond `limits` are refused here, and the engine never sees them. Raises ConfigError for what is
        no HTTP URL."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no engine's URL.", hint="It starts with http:// or https://.")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._deadlines = deadlines or Deadlines()
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; running streams end with EngineUnreachable."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        """The next tokens of one sample, as they come; the last chunk has a `finish`.

        Close it (`contextlib.aclosing`) when you leave early. Raises EngineRefused (the request is bad, or the key),
        EngineFailed, EngineUnreachable, EngineTimeout, EngineProtocolError.
        """
        self._check([request])
        reader = StreamReader(request, self._vocabulary)
        events = self._events(generate_body(request), f"request {request.rid}", reader, [request])
        async with aclosing(events):
            async for event in events:
                yield reader.read(event)

    async def generate_many(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        """The same for several requests over one connection: pairs of a request's place and its next chunk.

        Cheaper by the connections it saves; what breaks one of them (an error of `generate`) ends the stream for all.
        """
        self._check(requests)
        reader = ManyReader(requests, self._vocabulary)
        what = f"{len(requests)} requests from {requests[0].rid} on"
        events = self._events(generate_many_body(requests), what, reader, requests)
        async with aclosing(events):
            async for event in events:
                yield reader.read(event)

    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        if self._limits is not None:
            for request in requests:
                self._limits.check(request)

    @property
    def _vocabulary(self) -> int | None:
        return None if self._limits is None else self._limits.vocabulary

    async def _events(
        self,
        body: bytes,
        what: str,
        reader: StreamReader | ManyReader,
        requests: Sequence[GenerateRequest],
    ) -> AsyncGenerator[bytes, None]:
        """The events of one `/generate`, until `reader`, which the caller gives each of them, has finished."""
        stall_s = self._deadlines.stall_s
        loop = asyncio.get_running_loop()
        async with self._errors(what, stall_s):
            async with asyncio.timeout(stall_s):
                response = await self._open("POST", "/generate", body)
            try:
                if response.status != 200:
                    async with asyncio.timeout(self._deadlines.answer_s):
                        raise said_no(_error_status(response), words_of(await _read_body(response)), what)
                # asyncio.timeout must not span a yield: it would cancel the consumer.
                deadline = loop.time() + stall_s
                events = EventLines(most_event_bytes(requests))
                while True:
                    async with asyncio.timeout_at(deadline):
                        data = await response.content.readany()
                    seen = reader.seen
                    for event in events.feed(data):
                        given = loop.time()
                        yield event
                        if reader.finished:
                            await self._drain(response)
                            return
                        deadline += loop.time() - given  # the consumer's time is not the engine's
                    if reader.seen > seen:
                        deadline = loop.time() + stall_s
                    if events.done or not data:
                        raise EngineProtocolError(
                            f"The engine ended the stream of {what} without a finish.",
                            hint="What came before stands; let another engine go on from there.",
                        )
            finally:
                response.close()

    async def abort(self, rid: str) -> None:
        """End the request: its stream ends with what it has, and finish `abort`. Unknown ids are no error.

        Best before a pause or after `resume`. SGLang (0.5.23) matches by prefix (`r1` also ends `r10`); while paused
        it does not know requests that came since (close their streams), ends one that is held `in_place` only after
        `resume`, and may break the stream of one that was retracted, with tokens that it had not sent.
        """
        await self._post("/abort_request", {"rid": rid}, self._deadlines.answer_s)

    async def abort_all(self) -> None:
        """End every request, running and waiting."""
        await self._post("/abort_request", {"rid": "", "abort_all": True}, self._deadlines.answer_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. New requests wait until `resume`."""
        await self._post("/pause_generation", {"mode": mode.value}, self._deadlines.pause_s)

    async def resume(self) -> None:
        # Emptying the allocator's cache, which SGLang does unless told, is time that it stands for nothing.
        await self._post("/continue_generation", {"torch_empty_cache": False}, self._deadlines.pause_s)

    async def release_memory(self) -> None:
        """Give the KV memory back, and what is cached there with it. No request may be open."""
        await self._post("/release_memory_occupation", {"tags": ["kv_cache"]}, self._deadlines.pause_s)

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]}, self._deadlines.pause_s)

    async def update_weights_from_disk(self, path: Path | str, version: str, *, flush_cache: bool) -> None:
        """Load the weights in the folder `path` (as the engine sees it) and call them `version`.

        A paused engine loads them at once; otherwise the call waits for every running request. `flush_cache` must be
        False for an engine paused `in_place` with requests running. Raises EngineRefused if the weights cannot be
        loaded; the engine then keeps those it had.
        """
        body = {"model_path": str(path), "weight_version": version, "flush_cache": flush_cache}
        reply = await self._post("/update_weights_from_disk", body, self._deadlines.update_s)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRefused(
                f"The engine did not load the weights of version {version} from {path}: {words_of(reply)}",
                hint="Look whether the folder holds the engine's own model, and whole.",
                details={"status": 200},
            )

    async def begin_weight_update(self) -> bool:
        """Before `update_weights_from_tensor`, with `end_weight_update` after it. False for an engine that knows no
        such thing, and wants none (SGLang 0.5.17)."""
        try:
            await self._post("/begin_weight_update", {}, self._deadlines.pause_s)
        except EngineRefused as error:
            if error.details.get("status") == 404:
                return False
            raise
        return True

    async def end_weight_update(self) -> None:
        await self._post("/end_weight_update", {}, self._deadlines.pause_s)

    async def update_weights_from_tensor(self, payloads: Sequence[str], *, load_format: str) -> None:
        """Hand each rank its payload (pickled, in base64), to be loaded by the engine's `load_format`."""
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        reply = await self._post("/update_weights_from_tensor", body, self._deadlines.update_s)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRefused(
                f"The engine did not load by {load_format}: {words_of(reply)}", details={"status": 200}
            )

    async def name_weights(self, version: str) -> None:
        """Tell the engine that it serves `version` from now on; running requests go on."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._post("/update_weight_version", body, self._deadlines.pause_s)

    async def weights_checksum(self) -> Any:
        """The engine's own checksums of what is in its memory, of each rank: equal where the weights are.

        It reads all of its memory, and generates nothing meanwhile.
        """
        reply = await self._post("/weights_checker", {"action": "checksum"}, self._deadlines.update_s)
        if not isinstance(reply, dict) or "ranks" not in reply:
            raise EngineProtocolError(
                f"The engine answered /weights_checker without checksums: {words_of(reply)}"
            )
        return reply["ranks"]

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """Have requests be able to name the adapter in the folder `path` (as the engine sees it), in PEFT's layout.
        What runs goes on. Raises EngineRefused where it cannot be loaded, or there is one of this name."""
        body = {"lora_name": name, "lora_path": str(path)}
        self._require_success(await self._post("/load_lora_adapter", body, self._deadlines.update_s), name)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. SGLang answers when no request uses it any more. Raises EngineRefused where there is none
        of this name."""
        reply = await self._post("/unload_lora_adapter", {"lora_name": name}, self._deadlines.update_s)
        self._require_success(reply, name)

    def _require_success(self, reply: Any, name: str) -> None:
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRefused(
                f"The engine refuses adapter {name}: {words_of(reply)}", details={"status": 200}
            )

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Raises EngineRefused while requests run."""
        await self._post("/flush_cache", {}, self._deadlines.answer_s)

    async def freeze_gc(self) -> bool:
        """Have the garbage collectors of the engine's processes pass over all objects that there are now. SGLang's look
        at a million otherwise, and stop its HTTP process for a third of a second each time. False for an engine that
        knows no such thing."""
        try:
            await self._post("/freeze_gc", {}, self._deadlines.answer_s)
        except EngineRefused as error:
            if error.details.get("status") in (404, 405):
                return False
            raise
        return True

    async def load(self) -> EngineLoad:
        return load_of(await self._get("/v1/loads"))

    async def info(self) -> EngineInfo:
        model, server = await asyncio.gather(self._get("/model_info"), self._get("/server_info"))
        return info_of(model, server)

    async def is_ready(self) -> bool:
        """Whether it takes requests now: not while it loads, and SGLang says no while it is paused. Raises nothing.

        Not SGLang's `/health`, which generates a token and so never answers while paused.
        """
        status = await self._status("/ready")
        if status == 404:  # before SGLang had /ready
            status = await self._status("/model_info")
        return status == 200

    async def _status(self, path: str) -> int | None:
        """The HTTP status of a page; None where no answer comes in time."""
        within_s = self._deadlines.answer_s
        try:
            async with (
                self._errors(path, within_s),
                asyncio.timeout(within_s),
                await self._open("GET", path) as response,
            ):
                return response.status
        except EngineError:
            return None

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path, None, self._deadlines.answer_s)

    async def _post(self, path: str, body: dict[str, Any], within_s: float) -> Any:
        return await self._ask("POST", path, orjson.dumps(body), within_s)

    async def _ask(self, method: str, path: str, body: bytes | None, within_s: float) -> Any:
        """One question, one answer: JSON where it is JSON, else text. Where a kept connection breaks it is asked again:
        the engine may just have closed it, and to hear any of these calls twice changes nothing."""
        async with self._errors(path, within_s), asyncio.timeout(within_s):
            try:
                return await self._answer(method, path, body)
            except aiohttp.ClientConnectorError:
                raise  # that was a new one
            except (
                aiohttp.ServerDisconnectedError,
                aiohttp.ClientConnectionResetError,
                aiohttp.ClientOSError,
            ):
                return await self._answer(method, path, body)

    async def _answer(self, method: str, path: str, body: bytes | None) -> Any:
        async with await self._open(method, path, body) as response:
            if 200 <= response.status < 300:
                return await _read_body(response)
            raise said_no(_error_status(response), words_of(await _read_body(response)), path)

    async def _open(self, method: str, path: str, body: bytes | None = None) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._deadlines.connect_s),
                headers=self._headers,
                read_bufsize=_BUFFER_BYTES,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        ask = partial(self._session.request, method, self.url + path, data=body, allow_redirects=False)
        try:
            return await ask()
        except aiohttp.ConnectionTimeoutError:
            # The deadline runs on while this process is held up, and then the engine is not to blame. Nothing was sent.
            return await ask()

    async def _drain(self, response: aiohttp.ClientResponse) -> None:
        """Read what follows a finish, so that the connection can be used again; the sample is whole either way."""
        try:
            async with asyncio.timeout(1.0):
                while await response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # then the connection is closed instead

    @asynccontextmanager
    async def _errors(self, what: str, within_s: float) -> AsyncIterator[None]:
        """Turn what the network raises into this package's errors."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnreachable(
                f"The engine at {self.url} did not accept a connection in {self._deadlines.connect_s:g} s, twice "
                f"({what}).",
                hint="Is the machine up, and the port open?",
            ) from error
        except TimeoutError as error:
            raise EngineTimeout(
                f"The engine at {self.url} said nothing for {within_s:g} s ({what}).",
                hint="It is connected but does not progress: look at its own output, or replace it.",
                details={"within_s": within_s},
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(
                f"The connection to the engine at {self.url} broke ({what}): {type(error).__name__}: {error}",
                hint="The engine may be dead.",
            ) from error


def _error_status(response: aiohttp.ClientResponse) -> int:
    """The status of an answer that refuses. Raises EngineProtocolError for one that neither does nor refuses what was
    asked, such as a redirection: its body may never end."""
    if response.status < 400:
        raise EngineProtocolError(
            f"The engine answered {response.url.path} with status {response.status}, which means nothing here.",
            hint="Is this an engine's URL?",
            details={"status": response.status},
        )
    return response.status


async def _read_body(response: aiohttp.ClientResponse) -> Any:
    raw = bytearray()
    if (response.content_length or 0) <= _MOST_REPLY_BYTES:
        async for part in response.content.iter_any():
            raw += part
            if len(raw) > _MOST_REPLY_BYTES:
                break
    if (response.content_length or 0) > _MOST_REPLY_BYTES or len(raw) > _MOST_REPLY_BYTES:
        raise EngineProtocolError(
            f"The engine answered {response.url.path} with more than {_MOST_REPLY_BYTES} bytes.",
            hint="Is this an engine's URL?",
            details={"status": response.status},
        )
    if not raw:
        return None
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        if "json" in response.content_type:
            raise EngineProtocolError(
                f"The engine answered {response.url.path} with broken JSON.",
                hint="Is this an engine's URL?",
                details={"status": response.status, "body": raw[:300].decode(errors="replace")},
            ) from None
        return raw.decode(errors="replace")
