"""The embedded engine over HTTP: SGLang's routes, on aiohttp.

Invariants:
- *HTTP never waits for a step*: the engine's loop has a thread of its own, checkpoints are read in another one, and
  handlers only await;
- *who leaves is aborted*: a handler that is cancelled, because its client went away, takes its requests along;
- *a failed load changes nothing*: a checkpoint is read and checked whole before the loop hears of it.

This module must not know about slots or tensors.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web

from gyre.engines.dialect import FinishKind, PauseMode
from gyre.engines.embedded.adapter_routes import AdapterRoutes
from gyre.engines.embedded.core import EngineCore, Limits, Swap
from gyre.engines.embedded.engine_loop import SHUTTING_DOWN, EngineLoop
from gyre.engines.embedded.engine_requests import EngineRequest, RequestUpdate
from gyre.engines.embedded.errors import BadRequest, LoopEnded
from gyre.engines.embedded.model_choice import served_model
from gyre.engines.embedded.served_model import ServedModel
from gyre.engines.embedded.token_sampling import Sampling
from gyre.engines.embedded.wire import (
    AskedSample,
    UnknownField,
    chunk_of,
    error_of,
    loads_of,
    read_generate,
)
from gyre.errors import ConfigError
from gyre.models.adapters import ALL_LAYERS, AdapterLimits
from gyre.models.errors import ModelFolderError

ENGINE_VERSION = "gyre-embedded-1 (dialect of SGLang 0.5.23)"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEALTH_TIMEOUT_S = 20.0
_MOST_BODY_BYTES = 256 << 20
_OPEN_ROUTES = ("/health", "/health_generate", "/ready", "/ping")

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine is started. None: `context_length` is the model's, `max_total_tokens` what all slots can hold."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    max_running_requests: int = 64
    max_total_tokens: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int = 256
    dtype: str = "float32"
    threads: int = 1
    stream_interval: int = 1
    weight_version: str = "default"
    seed: int = 0
    api_key: str | None = None
    enable_lora: bool = False
    max_lora_rank: int | None = None
    lora_target_modules: Sequence[str] = (ALL_LAYERS,)
    """The last parts of the names of layers that adapters may change."""

    def adapters(self) -> AdapterLimits | None:
        """What adapters it takes. Raises ConfigError where nobody says of which rank."""
        if not self.enable_lora:
            return None
        if self.max_lora_rank is None:
            raise ConfigError(
                "--enable-lora needs --max-lora-rank.", hint="Give the largest rank of an adapter."
            )
        names = self.lora_target_modules
        return AdapterLimits(self.max_lora_rank, () if ALL_LAYERS in names else tuple(names))


class EngineServer:
    """One engine and its routes. `start` before the first request, `close` after the last."""

    def __init__(self, settings: EngineSettings) -> None:
        """Reads `config.json`. Raises ConfigError."""
        self.settings = settings
        self.model = served_model(Path(settings.model_path), settings.adapters())
        context = _context_length(self.model, settings)
        self.limits = Limits(
            max_running=settings.max_running_requests,
            max_tokens=settings.max_total_tokens or settings.max_running_requests * context,
            context_length=context,
            prefill_tokens=settings.chunked_prefill_size,
        )
        self._model_path = settings.model_path
        self._weight_version = settings.weight_version
        self._paused = False
        self._deterministic = False
        self._in_flight: dict[str, EngineRequest] = {}
        self._seeds = random.Random(settings.seed)
        self._http: asyncio.AbstractEventLoop | None = None
        self.loop = EngineLoop(self._build_core, self._post, threads=settings.threads)

    async def start(self) -> None:
        """Load the weights and start the loop. Raises ModelFolderError."""
        self._http = asyncio.get_running_loop()
        await asyncio.to_thread(self.loop.start)

    async def close(self) -> None:
        await asyncio.to_thread(self.loop.close)

    def app(self) -> web.Application:
        """The routes; starts and closes the engine with the application."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._checked(request, handler)

        async def started(_: web.Application) -> None:
            await self.start()

        async def shutting_down(_: web.Application) -> None:
            self._ask_nowait(lambda core: core.abort_all(SHUTTING_DOWN))

        async def closed(_: web.Application) -> None:
            await self.close()

        app = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[checked])
        app.on_startup.append(started)
        app.on_shutdown.append(shutting_down)
        app.on_cleanup.append(closed)
        app.add_routes(AdapterRoutes(self.model, _DTYPES[self.settings.dtype], self._ask, _json).routes())
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.put("/generate", self.generate),
                web.post("/abort_request", self.abort_request),
                web.post("/pause_generation", self.pause_generation),
                web.post("/continue_generation", self.continue_generation),
                web.post("/release_memory_occupation", self.memory_occupation),
                web.post("/resume_memory_occupation", self.memory_occupation),
                web.post("/update_weights_from_disk", self.update_weights_from_disk),
                web.post("/update_weight_version", self.update_weight_version),
                web.get("/flush_cache", self.flush_cache),
                web.post("/flush_cache", self.flush_cache),
                web.get("/health", self.health),
                web.get("/health_generate", self.health_generate),
                web.get("/ready", self.ready),
                web.get("/ping", self.health),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/v1/loads", self.loads),
            ]
        )
        return app

    # Generating

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = read_generate(await _json(http), vocab=self.model.vocab, limits=self.limits)
        for prompt in body.prompts:
            if prompt.rid in self._in_flight:
                raise BadRequest(f"Duplicate request ID detected: {prompt.rid} is in flight.")
        progress: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        requests = [self._request(prompt, body.stream, progress) for prompt in body.prompts]
        wants = {
            request.rid: prompt.return_logprob for request, prompt in zip(requests, body.prompts, strict=True)
        }
        places = {request.rid: place for place, request in enumerate(requests)} if body.batched else {}
        for request in requests:
            self._in_flight[request.rid] = request
        left = dict.fromkeys(wants)
        try:
            await self._ask(lambda core: core.submit(*requests))
            if body.stream:
                return await self._stream(http, progress, wants, places, left)
            endings: dict[str, RequestUpdate] = {}
            while left:
                update = await self._next(progress)
                endings[update.request.rid] = update
                del left[update.request.rid]
            replies = [_whole(endings[request.rid], wants[request.rid]) for request in requests]
            return _reply(replies if body.batched else replies[0])
        finally:
            for rid in wants:
                self._in_flight.pop(rid, None)
            if left:
                gone = frozenset(left)
                self._ask_nowait(lambda core: core.abort(lambda request: request.rid in gone))

    async def _stream(
        self,
        http: web.Request,
        progress: asyncio.Queue[RequestUpdate],
        wants: dict[str, bool],
        places: dict[str, int],
        left: dict[str, None],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        while left:
            try:
                updates = [await self._next(progress)]
            except LoopEnded as error:
                await response.write(_event(error_of(str(error), error.http_status)))
                break
            while not progress.empty():
                updates.append(progress.get_nowait())
            events = []
            for update in updates:
                rid, ending = update.request.rid, update.ending
                failed = ending is not None and ending.status_code is not None
                if not failed:
                    events.append(chunk_of(update, return_logprob=wants[rid], index=places.get(rid)))
                elif update.tokens:  # they stand, whatever came after them
                    whole = replace(update, ending=None)
                    events.append(chunk_of(whole, return_logprob=wants[rid], index=places.get(rid)))
                if ending is not None:
                    del left[rid]
                    if ending.status_code is not None:
                        events.append(error_of(ending.message, ending.status_code))
            await response.write(b"".join(_event(event) for event in events))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _next(self, progress: asyncio.Queue[RequestUpdate]) -> RequestUpdate:
        """The next update. Raises LoopEnded if none can come."""
        while True:
            try:
                async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                    return await progress.get()
            except TimeoutError:
                if not self.loop.alive and progress.empty():
                    raise LoopEnded("The engine's loop has ended.", hint="Start it again.") from None

    def _request(
        self, prompt: AskedSample, stream: bool, progress: asyncio.Queue[RequestUpdate]
    ) -> EngineRequest:
        seed = prompt.sampling.seed
        return EngineRequest(
            rid=prompt.rid,
            tokens=list(prompt.input_ids),
            sampling=prompt.sampling,
            seed=self._seeds.getrandbits(62) if seed is None else seed,
            stream_interval=(prompt.stream_interval or self.settings.stream_interval) if stream else 0,
            deliver=progress.put_nowait,
            adapter_name=prompt.adapter,
        )

    async def abort_request(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        rid = body.get("rid") or ""
        if body.get("abort_all"):
            await self._ask(lambda core: core.abort_all())
        elif isinstance(rid, str) and rid:
            await self._ask(lambda core: core.abort(lambda request: request.rid.startswith(rid)))
        else:
            raise BadRequest("abort_request needs a rid (a string, matched as a prefix) or abort_all: true.")
        return web.Response()

    # Pausing and weights

    async def pause_generation(self, http: web.Request) -> web.StreamResponse:
        given = (await _json(http)).get("mode", PauseMode.ABORT)
        if given not in list(PauseMode):
            raise BadRequest(f"mode must be one of {', '.join(PauseMode)}, got {given!r}.")
        await self._ask(lambda core: core.pause(PauseMode(given)))
        self._paused = True
        return _reply({"message": "Generation paused successfully.", "status": "ok"})

    async def memory_occupation(self, http: web.Request) -> web.StreamResponse:
        """Its KV memory is a few megabytes of the host's, and stays."""
        return web.Response()

    async def continue_generation(self, http: web.Request) -> web.StreamResponse:
        await _json(http)
        await self._ask(lambda core: core.resume())
        self._paused = False
        return _reply({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequest("update_weights_from_disk needs model_path, the folder of a checkpoint.")
        if version is not None and not isinstance(version, str):
            raise BadRequest(f"weight_version must be a string, not {version!r}.")
        flush, abort = body.get("flush_cache", True) is not False, body.get("abort_all_requests") is True
        try:
            weights = await asyncio.to_thread(self.model.load, Path(path), _DTYPES[self.settings.dtype])
            swapped: Future[int] = Future()
            swapped.set_running_or_notify_cancel()  # a client that leaves does not undo it

            def done(paused: int) -> None:
                self._model_path = path
                self._weight_version = self._weight_version if version is None else version
                swapped.set_result(paused)

            def swap(core: EngineCore) -> None:
                if abort:
                    core.abort_all()
                core.swap(Swap(weights, version, flush, done))

            await self._ask(swap)
            paused = await self._until(swapped)
        except (ModelFolderError, BadRequest) as error:
            return _reply({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        return _reply(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": paused}
        )

    async def update_weight_version(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        version = body.get("new_version")
        if not isinstance(version, str) or not version:
            raise BadRequest("update_weight_version needs new_version, a string.")
        abort = body.get("abort_all_requests", True) is not False

        def rename(core: EngineCore) -> None:
            if abort:
                core.abort_all()
            core.weight_version = version

        await self._ask(rename)
        self._weight_version = version
        return _reply(
            {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        )

    async def flush_cache(self, _: web.Request) -> web.StreamResponse:
        await self._ask(lambda core: core.flush())
        return web.Response(text="Cache flushed.\n")

    # Who it is and how it is

    async def health(self, _: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.loop.alive else 503)

    async def ready(self, _: web.Request) -> web.StreamResponse:
        """Whether requests that come now are stepped now: not while paused."""
        return web.Response(status=200 if self.loop.alive and not self._paused else 503)

    async def health_generate(self, _: web.Request) -> web.StreamResponse:
        """Generates a token; while paused, only sees whether the loop answers."""
        progress: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        prompt = AskedSample("HEALTH_CHECK", [0], Sampling(max_new_tokens=1, temperature=0.0), False, None)
        request = self._request(prompt, False, progress)
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._ask(lambda core: core.load())
                if self._paused:
                    return web.Response()
                await self._ask(lambda core: core.submit(request))
                update = await progress.get()
        except (TimeoutError, LoopEnded):
            return web.Response(status=503)
        finally:
            self._ask_nowait(lambda core: core.abort(lambda other: other is request))
        failed = update.ending is None or update.ending.kind is FinishKind.ABORT
        return web.Response(status=503 if failed and not self._paused else 200)

    async def model_info(self, _: web.Request) -> web.StreamResponse:
        return _reply(
            {
                "model_path": self._model_path,
                "tokenizer_path": None,
                "is_generation": True,
                "weight_version": self._weight_version,
                "model_type": self.model.family,
                "vocab_size": self.model.vocab,
            }
        )

    async def server_info(self, _: web.Request) -> web.StreamResponse:
        settings = asdict(self.settings)
        del settings["api_key"]
        return _reply(
            {
                **settings,
                "version": ENGINE_VERSION,
                "context_length": self.limits.context_length,
                "max_req_input_len": self.limits.context_length - 1,
                "max_total_num_tokens": self.limits.max_tokens,
                "skip_tokenizer_init": True,
                "incremental_streaming_output": True,
                "enable_deterministic_inference": self._deterministic,
                "internal_states": [
                    {"weight_version": self._weight_version, "last_gen_throughput": self.loop.tokens_per_s}
                ],
            }
        )

    async def loads(self, _: web.Request) -> web.StreamResponse:
        load = await self._ask(lambda core: core.load())
        return _reply(loads_of(load, tokens_per_s=self.loop.tokens_per_s, engine_version=ENGINE_VERSION))

    # The loop

    def _build_core(self) -> EngineCore:
        dtype = _DTYPES[self.settings.dtype]
        core = EngineCore(
            self.model,
            self.model.load(Path(self.settings.model_path), dtype),
            self.limits,
            weight_version=self.settings.weight_version,
        )
        self._deterministic = self.settings.threads == 1 and core.runner.invariant
        return core

    def _post(self, updates: list[RequestUpdate]) -> None:
        """Hand updates from the loop's thread to this one. Called once a step."""
        assert self._http is not None
        try:
            self._http.call_soon_threadsafe(_deliver, updates)
        except RuntimeError:
            _log.debug("%d updates came after the server had closed", len(updates))

    async def _ask(self, function: Callable[[EngineCore], Any]) -> Any:
        return await self._until(self.loop.ask(function))

    def _ask_nowait(self, function: Callable[[EngineCore], Any]) -> None:
        self.loop.ask(function)

    async def _until(self, future: Future[Any]) -> Any:
        """The future's result. Raises LoopEnded when the loop ends without giving one."""
        wrapped = asyncio.wrap_future(future)
        while True:
            done, _ = await asyncio.wait([wrapped], timeout=_HEALTH_TIMEOUT_S)
            if done:
                return wrapped.result()
            if not self.loop.alive:
                raise LoopEnded("The engine's loop has ended.", hint="Start the engine again.")

    async def _checked(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the API key, if one is set, and answer every error as SGLang would."""
        key = self.settings.api_key
        if key is not None and http.path not in _OPEN_ROUTES:
            given = http.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return _reply(
                    error_of("The API key is missing or wrong: send Authorization: Bearer KEY.", 401), 401
                )
        try:
            return await handler(http)
        except UnknownField as error:
            return _reply({"error": str(error)}, 400)
        except (BadRequest, ModelFolderError, LoopEnded) as error:
            return _reply(error_of(str(error), error.http_status), error.http_status)


def _context_length(model: ServedModel, settings: EngineSettings) -> int:
    """The most tokens of a sample with its prompt. Raises ConfigError for more than the model has positions."""
    context = settings.context_length or model.max_positions
    if context > model.max_positions:
        raise ConfigError(
            f"--context-length {context} exceeds the model's max_position_embeddings of {model.max_positions}.",
            hint="Give a smaller one.",
        )
    return context


def _deliver(updates: list[RequestUpdate]) -> None:
    for update in updates:
        update.request.deliver(update)


def _whole(update: RequestUpdate, return_logprob: bool) -> dict[str, Any]:
    """The reply to a request that is no stream. Raises LoopEnded where the engine failed."""
    if update.ending is not None and update.ending.status_code is not None:
        raise _Failed(update.ending.message)
    return chunk_of(update, return_logprob=return_logprob)


class _Failed(LoopEnded):
    http_status = 500


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _reply(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def _json(http: web.Request) -> Any:
    """The body, {} if there is none. Raises BadRequest."""
    raw = await http.read()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body
