"""Serves Gyre's dialect (`gyre.engines.dialect`) over vLLM's engine, under vLLM's own Python:
`python -m gyre_vllm_server --model DIR --port N [vLLM's ENGINE ARGUMENT ...]`.

vLLM's own server is not started: its routes for weights, pauses and aborts ask nobody for a key, and its dialect is
another. What is here is a translation of requests and replies; the engine is `AsyncLLM`, unchanged.

Invariants:
- *the key guards all*: every route but the question whether it lives wants the key that the environment holds;
- *disjoint chunks*: `output_ids` and `output_token_logprobs` of a chunk are new ones, `completion_tokens` counts all;
- *who leaves is aborted*: a handler whose client went away takes its requests along;
- *loaded in a pause*: weights change while no step is made, and their name changes with them;
- *a dead engine ends its server*: within a second, so that whoever watches the process knows.

It runs where Gyre is not installed: it must import nothing of Gyre.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import sys
import tempfile
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "GYRE_ENGINE_API_KEY"
"""The environment variable with the key, as `gyre_launch_server`'s."""

LOADER = "gyre_weight_loader.load"
"""What asks for Gyre's loader, where others would name a way to load the tensors that they send."""

SEED = "gyre_seed"
"""As `gyre_vllm_worker.SEED`, which brings torch."""

_OPEN = ("/health", "/ping")
_LOOK_S = 0.5
_MOST_BODY_BYTES = 256 << 20
_PAUSES = {"abort": ("abort", False), "retract": ("keep", True), "in_place": ("keep", False)}
"""vLLM's word for each of the dialect's pauses, and whether what is cached is dropped."""

_PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "stream_interval": "stream_interval",
    "sampling_seed": "",
}
"""The sampling parameters that are taken, by vLLM's name; a seed goes to the worker."""


class DialectRefused(Exception):
    """What the dialect answers with this status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class OpenRequest:
    """A request that is open. `made`: tokens that were sent."""

    prompt: int
    made: int = 0


class Server:
    """The engine's routes. `version` is the name of its first weights, `interval` the tokens of a chunk where a request
    does not say; seeds count where it draws `by_seed`."""

    def __init__(self, engine: Any, *, key: str, version: str, interval: int, by_seed: bool) -> None:
        self.engine, self.key, self.version = engine, key, version
        self.interval, self.by_seed = interval, by_seed
        self.model_path = str(engine.model_config.model)
        self.is_paused = False
        self.flows: dict[str, OpenRequest] = {}
        self.adapters: dict[str, Any] = {}
        self._numbers = 0
        self._changing = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[self._middleware()])
        posts = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.load_folder,
            "/update_weights_from_tensor": self.load_prepared,
            "/update_weight_version": self.name_weights,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.memory,
            "/resume_memory_occupation": self.memory,
        }
        gets = {
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
        }
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        return app

    def _middleware(self) -> Any:
        @web.middleware
        async def checked(http: web.Request, handler: Any) -> web.StreamResponse:
            given = http.headers.get("Authorization", "")
            if http.path not in _OPEN and not hmac.compare_digest(
                given.encode(), f"Bearer {self.key}".encode()
            ):
                return _reply(
                    _error("The API key is missing or wrong: send Authorization: Bearer KEY.", 401), 401
                )
            try:
                answer: web.StreamResponse = await handler(http)
                return answer
            except DialectRefused as error:
                return _reply(_error(str(error), error.status), error.status)

        return checked

    # Generating

    async def generate(self, http: web.Request) -> web.StreamResponse:
        asked = self._read(await _json(http))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        events: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(one, events)) for one in asked]
        left = len(pumps)
        try:
            while left:
                told = [await events.get()]
                while not events.empty():
                    told.append(events.get_nowait())
                left -= sum(is_last for _, is_last in told)
                await response.write(b"".join(event for event, _ in told))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        return response

    async def _pump(self, one: dict[str, Any], events: asyncio.Queue[tuple[bytes, bool]]) -> None:
        """Put the chunks of one request among the events, each with whether it is its last."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        rid, place = one["rid"], one["place"]
        flow = self.flows[rid] = OpenRequest(len(one["ids"]))

        def put(body: dict[str, Any], is_last: bool) -> None:
            body = body if place is None else {**body, "index": place}
            events.put_nowait((b"data: " + json.dumps(body).encode() + b"\n\n", is_last))

        try:
            stream = self.engine.generate(one["prompt"], one["params"], rid, lora_request=one["adapter"])
            async with aclosing(stream):
                async for output in stream:
                    put(self._chunk(rid, flow, output), output.finished)
        except (VLLMClientError, ValueError, TypeError) as error:
            put(_error(str(error), 400), True)
        except EngineDeadError:
            _end("its engine is dead")
        except Exception as error:
            put(_error(f"{type(error).__name__}: {error}", 500), True)
        finally:
            self.flows.pop(rid, None)

    def _chunk(self, rid: str, flow: OpenRequest, output: Any) -> dict[str, Any]:
        (made,) = output.outputs
        ids = list(made.token_ids)
        flow.made += len(ids)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": _finish(made, flow.made) if output.finished else None,
            "prompt_tokens": flow.prompt,
            "weight_version": self.version,
            "completion_tokens": flow.made,
            "cached_tokens": output.num_cached_tokens,
            "output_token_logprobs": [
                (told[token].logprob, token, None)
                for token, told in zip(ids, made.logprobs or (), strict=True)
            ],
            "output_token_logprobs_length": flow.made,
        }
        if output.finished:
            meta["weight_versions"] = [
                {"version": span.version, "start": span.start, "end": span.end}
                for span in made.weight_versions or ()
            ]
        return {"output_ids": ids, "meta_info": meta}

    def _read(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The requests of a body. Raises DialectRefused."""
        ids = body.get("input_ids")
        if body.get("stream") is not True or not isinstance(ids, list):
            raise DialectRefused("Give input_ids, one list of token ids or several, and stream: true.")
        batched = bool(ids) and isinstance(ids[0], list)
        rows = ids if batched else [ids]
        columns = {key: body.get(key) for key in ("rid", "sampling_params", "extra_key", "lora_path")}
        asked = []
        for place, row in enumerate(rows):
            one = {
                key: value[place] if batched and isinstance(value, list) else value
                for key, value in columns.items()
            }
            asked.append(self._request(row, place if batched else None, **one))
        if len({one["rid"] for one in asked} - self.flows.keys()) < len(asked):
            raise DialectRefused("Duplicate request ID: each needs one that no other open request has.")
        return asked

    def _request(
        self, ids: Any, place: int | None, *, rid: Any, sampling_params: Any, extra_key: Any, lora_path: Any
    ) -> dict[str, Any]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        given = sampling_params if isinstance(sampling_params, dict) else {}
        wanted = self._checked(ids, rid, given)
        if lora_path and lora_path not in self.adapters:
            raise DialectRefused(f"There is no adapter {lora_path!r}.")
        seed = given.get("sampling_seed") if self.by_seed else None
        try:
            params = SamplingParams(
                **{"stream_interval": self.interval, **wanted},
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=None if seed is None else {SEED: int(seed)},
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            raise DialectRefused(str(error)) from error
        prompt = TokensPrompt(prompt_token_ids=ids)
        if extra_key:
            prompt["cache_salt"] = str(extra_key)
        adapter = self.adapters[lora_path] if lora_path else None
        return {
            "rid": rid,
            "ids": ids,
            "prompt": prompt,
            "params": params,
            "adapter": adapter,
            "place": place,
        }

    def _checked(self, ids: Any, rid: Any, given: dict[str, Any]) -> dict[str, Any]:
        """The sampling parameters by vLLM's names. Raises DialectRefused for a request that cannot be."""
        for key in given:
            if key not in _PARAMS:
                raise DialectRefused(
                    f"unknown field `{key}`, expected one of {', '.join(f'`{name}`' for name in _PARAMS)}"
                )
        if not isinstance(rid, str) or not rid:
            raise DialectRefused("Each request needs a rid, a text.")
        vocabulary, most = self.engine.model_config.get_vocab_size(), self.engine.model_config.max_model_len
        if (
            not isinstance(ids, list)
            or not ids
            or not all(type(one) is int and 0 <= one < vocabulary for one in ids)
        ):
            raise DialectRefused(f"input_ids must hold at least one token id, each below {vocabulary}.")
        wanted = {_PARAMS[key]: value for key, value in given.items() if _PARAMS[key]}
        if wanted.get("ignore_eos"):
            wanted.pop(
                "stop_token_ids", None
            )  # SGLang's meaning of the flag; vLLM stops at them all the same
        new = wanted.get("max_tokens")
        if type(new) is not int or new < 1 or len(ids) + new > most:
            raise DialectRefused(
                f"{len(ids)} tokens and max_new_tokens {new!r} do not fit in a context of {most}."
            )
        return wanted

    async def abort(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        rids = list(self.flows) if body.get("abort_all") else [body.get("rid")]
        await self.engine.abort([rid for rid in rids if rid in self.flows])
        return web.Response()

    # Pausing and weights

    async def pause(self, http: web.Request) -> web.StreamResponse:
        mode = (await _json(http)).get("mode", "abort")
        if mode not in _PAUSES:
            raise DialectRefused(f"mode must be one of {', '.join(_PAUSES)}, got {mode!r}.")
        vllms, drops = _PAUSES[mode]
        await self.engine.pause_generation(mode=vllms, clear_cache=drops)
        self.is_paused = True
        return _reply({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: web.Request) -> web.StreamResponse:
        await self.engine.resume_generation()
        self.is_paused = False
        return _reply({"message": "Generation continued successfully.", "status": "ok"})

    async def load_folder(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        path, version, flush = (
            str(body.get("model_path")),
            body.get("weight_version"),
            body.get("flush_cache", True),
        )
        async with self._changing:
            was_paused = self.is_paused
            if not was_paused:
                await self.engine.pause_generation(mode="wait", clear_cache=bool(flush))
            try:
                if was_paused and flush and not await self.engine.reset_prefix_cache():
                    raise DialectRefused(
                        "The cache cannot be flushed while requests hold it: give flush_cache false."
                    )
                told = await self.engine.collective_rpc("gyre_load_folder", args=(path,))
                if problem := next(filter(None, told), ""):
                    return _reply({"success": False, "message": problem}, 400)
                self.model_path = path
                await self._name(self.version if version is None else str(version))
            finally:
                if not was_paused:
                    await self.engine.resume_generation()
        return _reply({"success": True, "message": "Succeeded to update model weights."})

    async def load_prepared(self, http: web.Request) -> web.StreamResponse:
        if (await _json(http)).get("load_format") != LOADER:
            raise DialectRefused(f"This engine loads tensors by {LOADER} alone.")
        async with self._changing:
            told = await self.engine.collective_rpc("gyre_load")
        problem = next(filter(None, told), "")
        return _reply({"success": not problem, "message": problem}, 400 if problem else 200)

    async def name_weights(self, http: web.Request) -> web.StreamResponse:
        await self._name(str((await _json(http)).get("new_version")))
        return _reply({"success": True, "new_version": self.version})

    async def _name(self, version: str) -> None:
        await self.engine.update_weight_version(version)
        self.version = version

    async def flush(self, http: web.Request) -> web.StreamResponse:
        if (self.flows and not self.is_paused) or not await self.engine.reset_prefix_cache():
            raise DialectRefused("The cache cannot be flushed while requests hold it.")
        return web.Response(text="Cache flushed.\n")

    async def memory(self, http: web.Request) -> web.StreamResponse:
        if self.engine.vllm_config.device_config.device_type != "cpu":
            raise DialectRefused("This engine keeps its memory.", 404)
        return web.Response()  # the host's, which stays

    # Adapters

    async def load_adapter(self, http: web.Request) -> web.StreamResponse:
        from vllm.lora.request import LoRARequest

        body = await _json(http)
        name, path = body.get("lora_name"), body.get("lora_path")
        if (
            not isinstance(name, str)
            or not name
            or not isinstance(path, str)
            or not path
            or name in self.adapters
        ):
            return _adapter(f"{name!r} at {path!r} is no adapter that can be loaded, or it is there already")
        self._numbers += 1
        try:
            # vLLM reads it once: it keeps as many in memory as Gyre's agents load.
            with tempfile.TemporaryDirectory(prefix="gyre-adapter-") as place:
                await asyncio.to_thread(_as_peft_names_it, Path(path), Path(place))
                adapter = LoRARequest(lora_name=name, lora_int_id=self._numbers, lora_path=place)
                if not await self.engine.add_lora(adapter):
                    raise DialectRefused("vLLM did not take it")
        except Exception as error:  # vLLM's own, of any kind; it lives on
            return _adapter(f"the adapter at {path}: {type(error).__name__}: {error}"[:2000])
        self.adapters[name] = adapter
        return _adapter()

    async def unload_adapter(self, http: web.Request) -> web.StreamResponse:
        name = (await _json(http)).get("lora_name")
        if name not in self.adapters:
            return _adapter(f"there is no adapter {name!r}")
        await self.engine.remove_lora(self.adapters.pop(name).lora_int_id)
        return _adapter()

    # Who it is and how it is

    async def health(self, http: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.engine.errored else 200)

    async def ready(self, http: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.engine.errored or self.is_paused else 200)

    async def model_info(self, http: web.Request) -> web.StreamResponse:
        return _reply({"model_path": self.model_path, "weight_version": self.version, "is_generation": True})

    async def server_info(self, http: web.Request) -> web.StreamResponse:
        import vllm

        config = self.engine.vllm_config
        parallel = config.parallel_config
        sizes = config.compilation_config.cudagraph_capture_sizes or ()
        return _reply(
            {
                "version": f"vllm-{vllm.__version__}",
                "context_length": config.model_config.max_model_len,
                "tp_size": parallel.tensor_parallel_size,
                "pp_size": parallel.pipeline_parallel_size,
                "dp_size": parallel.data_parallel_size,
                "nnodes": parallel.nnodes,
                "speculative_algorithm": config.speculative_config and "yes",
                "cuda_graph_max_bs": max(sizes, default=None),
            }
        )

    async def loads(self, http: web.Request) -> web.StreamResponse:
        """Counted here, where every request passes: vLLM's own counts come with its steps, and stand in a pause.
        Prefixes that requests share count for each of them."""
        config = self.engine.vllm_config
        running = [flow for flow in self.flows.values() if flow.made]
        return _reply(
            {
                "loads": [
                    {
                        "num_running_reqs": len(running),
                        "num_waiting_reqs": len(self.flows) - len(running),
                        "num_used_tokens": sum(flow.prompt + flow.made for flow in running),
                        "max_total_num_tokens": config.cache_config.num_gpu_blocks
                        * config.cache_config.block_size,
                        "max_running_requests": config.scheduler_config.max_num_seqs,
                    }
                ]
            }
        )

    async def watch(self) -> None:
        """Ends this process when the engine is dead."""
        while not self.engine.errored:  # noqa: ASYNC110 - vLLM has nothing else to wait for
            await asyncio.sleep(_LOOK_S)
        _end("its engine is dead")


def _end(why: str) -> None:
    print(f"gyre_vllm_server: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _finish(made: Any, total: int) -> dict[str, Any]:
    if made.finish_reason == "stop":
        return {"type": "stop", "matched": made.stop_reason}
    if made.finish_reason == "length":
        return {"type": "length", "length": total}
    failed = made.finish_reason != "abort"
    return {"type": "abort", "message": f"vLLM: {made.finish_reason}", "status_code": 500 if failed else None}


def _as_peft_names_it(folder: Path, place: Path) -> None:
    """Make `place` the adapter in `folder`, whose file of tensors has the name of a model's: PEFT's is another, and
    vLLM reads that one alone."""
    from safetensors.torch import load_file, save_file

    (place / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    named: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        named |= load_file(file)
    save_file(named, place / "adapter_model.safetensors")


def _error(message: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message[:2000], "code": status, "retryable": status >= 500}}


def _reply(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _adapter(problem: str = "") -> web.Response:
    return _reply({"success": not problem, "error_message": problem}, 400 if problem else 200)


async def _json(http: web.Request) -> dict[str, Any]:
    """The body, {} if there is none. Raises DialectRefused."""
    raw = await http.read()
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise DialectRefused(f"The body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise DialectRefused("The body must be a JSON object.")
    return body


async def serve(arguments: Any) -> None:
    """Serve until SIGTERM or SIGINT."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = AsyncEngineArgs.from_cli_args(arguments)
    given.skip_tokenizer_init = True  # token ids in and out
    given.generation_config = "vllm"  # else the folder's own top_p and temperature are defaults
    given.disable_log_stats = True
    given.worker_extension_cls = "gyre_vllm_worker.GyreWorker"
    engine = AsyncLLM.from_engine_args(given)
    try:
        await engine.collective_rpc("gyre_begin")
        await engine.update_weight_version(arguments.weight_version)
        server = Server(
            engine,
            key=os.environ.pop(KEY),
            version=arguments.weight_version,
            interval=arguments.chunk_tokens,
            by_seed=arguments.by_seed,
        )
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, arguments.host, arguments.port).start()
        watch = asyncio.create_task(server.watch())
        print(f"vLLM is ready on http://{arguments.host}:{arguments.port}", flush=True)
        await stopped.wait()
        watch.cancel()
        await runner.cleanup()
    finally:
        engine.shutdown()


def main() -> None:
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="gyre_vllm_server"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--chunk-tokens", type=int, default=1)
    parser.add_argument("--by-seed", action="store_true")
    arguments = parser.parse_args()
    if arguments.by_seed and current_platform.is_cuda():
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # read by the engine's processes, which begin after this
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
