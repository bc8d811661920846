"""The routes over a real socket: what the conformance suite, which speaks through the client, does not see."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from gyre.engines.embedded.__main__ import main
from gyre.engines.embedded.http_server import EngineServer, EngineSettings
from gyre.engines.process import EngineProcess
from gyre.rollouts.agent.join import EngineCommands
from tests.engines.embedded.tiny import Model, ask, run, write_checkpoint
from tests.waits import GENEROUS_S

PROMPT = [3, 1, 4, 1, 5]
LONG = 900


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_checkpoint(folder / str(seed), seed=seed) for seed in (0, 1)]


class Served:
    """An engine in this process, and a session that speaks to it."""

    def __init__(self, server: EngineServer, url: str, session: aiohttp.ClientSession) -> None:
        self.server, self.url, self.session = server, url, session

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if response.content_type.endswith("json") else raw

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            raw = await response.read()
            return response.status, orjson.loads(raw) if response.content_type.endswith("json") else raw

    def opened(self, **body: Any) -> Any:
        return self.session.post(f"{self.url}/generate", json={"stream": True, **body})

    async def events(self, **body: Any) -> list[Any]:
        """A whole stream."""
        async with self.opened(**body) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            return [event async for event in events_of(response)]

    async def load(self) -> tuple[int, int]:
        _, body = await self.get("/v1/loads")
        return body["loads"][0]["num_running_reqs"], body["loads"][0]["num_waiting_reqs"]

    async def until_load(self, running: int, waiting: int) -> None:
        async with asyncio.timeout(GENEROUS_S):
            while True:
                if await self.load() == (running, waiting):
                    return
                await asyncio.sleep(0.01)


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "DONE" if data == b"[DONE]" else orjson.loads(data)


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


@contextlib.asynccontextmanager
async def serve(
    folder: Path, headers: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Served]:
    server = EngineServer(EngineSettings(str(folder), **settings))
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Served(server, url, session)
    finally:
        await runner.cleanup()


@pytest.fixture
async def served(folders) -> AsyncIterator[Served]:
    async with serve(folders[0], max_running_requests=4, weight_version="1") as served:
        yield served


def params(new: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 5, **more}


# Generating


async def test_a_reply_says_everything_sglang_says(served, folders):
    status, reply = await served.post(
        "/generate", input_ids=PROMPT, sampling_params=params(6), return_logprob=True, rid="one"
    )
    alone = ask(PROMPT, 6, seed=5)
    run(Model(folders[0]).core(), alone)
    assert status == 200
    assert reply["output_ids"] == alone.tokens
    meta = reply["meta_info"]
    assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == alone.logprobs
    assert [(token, text) for _, token, text in meta["output_token_logprobs"]] == [
        (token, None) for token in alone.tokens
    ]
    assert meta.pop("e2e_latency") > 0
    del meta["output_token_logprobs"], meta["input_token_logprobs"]
    assert meta == {
        "id": "one",
        "finish_reason": {"type": "length", "length": 6},
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": 6}],
        "output_token_logprobs_length": 6,
    }


async def test_a_stream_is_incremental_and_ends_with_done(served):
    _, whole = await served.post(
        "/generate", input_ids=PROMPT, sampling_params=params(20), return_logprob=True
    )
    *chunks, done = await served.events(
        input_ids=PROMPT, sampling_params=params(20, stream_interval=8), return_logprob=True
    )
    assert done == "DONE"
    metas = [chunk["meta_info"] for chunk in chunks]
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 8, 8, 3]
    assert [meta["completion_tokens"] for meta in metas] == [1, 9, 17, 20]
    assert [meta["output_token_logprobs_length"] for meta in metas] == [1, 9, 17, 20]
    assert [meta["finish_reason"] for meta in metas[:-1]] == [None] * 3
    assert joined(chunk["output_ids"] for chunk in chunks) == whole["output_ids"]
    pairs = joined(meta["output_token_logprobs"] for meta in metas)
    assert pairs == whole["meta_info"]["output_token_logprobs"]
    told = [
        [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]] for meta in metas
    ]
    assert told == [[("1", 0, total)] for total in (1, 9, 17, 20)]


async def test_log_probs_are_left_out_unless_asked_for(served):
    _, reply = await served.post("/generate", input_ids=PROMPT, sampling_params=params(3))
    assert "output_token_logprobs" not in reply["meta_info"]


async def test_a_batch_is_answered_in_its_order_and_streamed_with_indices(served):
    prompts = [[1, 2], [3], PROMPT]
    _, replies = await served.post(
        "/generate", input_ids=prompts, sampling_params=params(4), rid=["x", "y", "z"]
    )
    assert [reply["meta_info"]["id"] for reply in replies] == ["x", "y", "z"]
    *chunks, _ = await served.events(input_ids=prompts, sampling_params=params(4))
    for index, reply in enumerate(replies):
        own = [chunk["output_ids"] for chunk in chunks if chunk["index"] == index]
        assert joined(own) == reply["output_ids"]


async def test_a_request_id_that_is_in_flight_is_refused(served):
    async with served.opened(input_ids=PROMPT, sampling_params=params(LONG), rid="same") as response:
        await anext(events_of(response))
        status, reply = await served.post("/generate", input_ids=PROMPT, rid="same")
        assert status == 400
        assert "Duplicate request ID detected: same" in reply["error"]["message"]
    await served.until_load(0, 0)
    assert (await served.post("/generate", input_ids=PROMPT, rid="same"))[0] == 200


async def test_who_leaves_frees_its_slot_even_while_paused_or_waiting(served):
    async with contextlib.AsyncExitStack() as stack:
        for i in range(5):
            response = await stack.enter_async_context(
                served.opened(input_ids=[i, *PROMPT], sampling_params=params(LONG))
            )
            if i == 3:
                await anext(events_of(response))
        await served.post("/pause_generation", mode="in_place")
        assert await served.load() == (4, 1)
    await served.until_load(0, 0)
    await served.post("/continue_generation")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (orjson.dumps({"text": "hello"}), "no tokenizer"),
        (orjson.dumps({"input_ids": [96]}), "96, which is no token id"),
        (orjson.dumps({"input_ids": [1], "sampling_params": {"top_p": 2}}), "top_p must be above 0"),
        (orjson.dumps({"input_ids": [1] * 1000}), "exceeds the model's context length of 1024"),
    ],
)
async def test_bad_input_is_refused_in_a_sentence(served, body, sentence):
    async with served.session.post(f"{served.url}/generate", data=body) as response:
        assert response.status == 400
        assert sentence in (await response.json())["error"]["message"]


async def test_an_unknown_sampling_key_is_refused_as_sglang_does(served):
    status, reply = await served.post("/generate", input_ids=PROMPT, sampling_params={"max_tokens": 4})
    assert status == 400
    assert reply["error"].startswith("unknown field `max_tokens`, expected one of `max_new_tokens`")


# Aborts, pauses and weights


async def test_abort_matches_by_prefix_and_answers_unknown_ids_too(served):
    tasks = [
        asyncio.create_task(served.post("/generate", input_ids=PROMPT, sampling_params=params(LONG), rid=rid))
        for rid in ("job1-a", "job1-b", "job2-a")
    ]
    await served.until_load(3, 0)
    assert await served.post("/abort_request", rid="nobody") == (200, b"")
    assert await served.post("/abort_request", rid="job1") == (200, b"")
    for _, reply in (await tasks[0], await tasks[1]):
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < LONG
    assert not tasks[2].done()
    await served.post("/abort_request", abort_all=True)
    assert (await tasks[2])[1]["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert (await served.post("/abort_request"))[0] == 400


async def test_an_update_while_paused_shows_in_the_spans(served, folders):
    task = asyncio.create_task(
        served.events(input_ids=PROMPT, sampling_params=params(LONG), return_logprob=True)
    )
    await served.until_load(1, 0)
    assert (await served.post("/pause_generation", mode="in_place"))[1]["status"] == "ok"
    assert (await served.get("/ready"))[0] == 503
    assert (await served.get("/health"))[0] == 200
    assert (await served.get("/health_generate"))[0] == 200
    flushing = await served.post("/update_weights_from_disk", model_path=str(folders[1]), weight_version="2")
    assert flushing[0] == 400
    assert "flush_cache must be false" in flushing[1]["message"]
    assert (await served.get("/model_info"))[1]["weight_version"] == "1"
    status, reply = await served.post(
        "/update_weights_from_disk", model_path=str(folders[1]), weight_version="2", flush_cache=False
    )
    assert (status, reply["success"], reply["num_paused_requests"]) == (200, True, 1)
    assert (await served.get("/model_info"))[1]["model_path"] == str(folders[1])
    await served.post("/continue_generation")
    *chunks, last, _ = await task
    one, two = last["meta_info"]["weight_versions"]
    for chunk in chunks:  # each chunk knows of each of its tokens
        *_, newest = chunk["meta_info"]["weight_versions"]
        total = chunk["meta_info"]["completion_tokens"]
        assert (newest["version"], newest["end"]) == ("1" if total <= one["end"] else "2", total)
    assert (one["version"], two["version"]) == ("1", "2")
    assert (one["start"], one["end"], two["end"]) == (0, two["start"], LONG)


async def test_an_update_that_is_not_paused_waits_for_running_requests(served, folders):
    task = asyncio.create_task(served.post("/generate", input_ids=PROMPT, sampling_params=params(LONG)))
    await served.until_load(1, 0)
    status, reply = await served.post(
        "/update_weights_from_disk", model_path=str(folders[1]), weight_version="2"
    )
    assert (status, reply["success"]) == (200, True)
    _, ended = await asyncio.wait_for(task, GENEROUS_S)
    assert ended["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": LONG}]
    assert (await served.get("/model_info"))[1]["weight_version"] == "2"


async def test_an_update_can_abort_what_runs(served, folders):
    task = asyncio.create_task(served.post("/generate", input_ids=PROMPT, sampling_params=params(LONG)))
    await served.until_load(1, 0)
    path = str(folders[1])
    await served.post("/update_weights_from_disk", model_path=path, abort_all_requests=True)
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_load_that_fails_changes_nothing_and_says_why(served, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    before = await served.post("/generate", input_ids=PROMPT, sampling_params=params(6))
    for body, why in [
        ({"model_path": str(tmp_path / "none")}, "holds no safetensors"),
        ({"model_path": str(tmp_path)}, "cannot be read as safetensors"),
    ]:
        status, reply = await served.post("/update_weights_from_disk", weight_version="2", **body)
        assert (status, reply["success"]) == (400, False)
        assert why in reply["message"]
    assert (await served.post("/update_weights_from_disk"))[0] == 400
    after = await served.post("/generate", input_ids=PROMPT, sampling_params=params(6))
    assert before[1]["output_ids"] == after[1]["output_ids"]
    assert after[1]["meta_info"]["weight_version"] == "1"


async def test_the_version_alone_can_be_changed(served):
    status, reply = await served.post("/update_weight_version", new_version="7")
    assert (status, reply["success"]) == (200, True)
    _, generated = await served.post("/generate", input_ids=PROMPT, sampling_params=params(2))
    assert generated["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    assert (await served.post("/update_weight_version"))[0] == 400


async def test_flush_is_refused_while_requests_run(served):
    async with served.opened(input_ids=PROMPT, sampling_params=params(LONG)) as response:
        await anext(events_of(response))
        assert (await served.post("/flush_cache"))[0] == 400
    await served.until_load(0, 0)
    assert (await served.get("/flush_cache"))[0] == 200


async def test_an_unknown_pause_mode_is_refused(served):
    status, reply = await served.post("/pause_generation", mode="softly")
    assert status == 400
    assert "mode must be one of abort, retract, in_place, got 'softly'" in reply["error"]["message"]


# Who it is, and how it ends


async def test_an_engine_says_what_it_is(served, folders):
    _, info = await served.get("/server_info")
    assert info["context_length"] == 1024
    assert info["max_total_num_tokens"] == 4 * 1024
    assert info["enable_deterministic_inference"] is True
    assert "api_key" not in info
    assert (await served.get("/health_generate"))[0] == 200
    assert (await served.get("/nothing"))[0] == 404


async def test_a_key_is_asked_for_where_there_is_one(folders):
    async with serve(folders[0], api_key="secret") as served:
        assert (await served.post("/generate", input_ids=PROMPT))[0] == 401
        assert (await served.get("/ready"))[0] == 200
    async with serve(folders[0], {"Authorization": "Bearer secret"}, api_key="secret") as served:
        assert (await served.get("/model_info"))[0] == 200


async def test_a_broken_engine_ends_streams_with_an_error_and_is_not_healthy(served, caplog):
    def broken(core: Any) -> None:
        core.runner = None

    task = asyncio.create_task(served.events(input_ids=PROMPT, sampling_params=params(LONG)))
    await served.until_load(1, 0)
    served.server.loop.ask(broken)
    *chunks, error, done = await asyncio.wait_for(task, GENEROUS_S)
    assert done == "DONE"
    assert "The engine failed" in error["error"]["message"]
    assert error["error"]["code"] == 500
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks)
    assert (await served.get("/health"))[0] == 503
    assert (await served.post("/generate", input_ids=PROMPT))[0] == 503
    assert (await served.get("/v1/loads"))[0] == 503


async def test_shutting_down_ends_streams_with_what_they_have(folders):
    async with (
        serve(folders[0]) as served,
        served.opened(input_ids=PROMPT, sampling_params=params(LONG)) as response,
    ):
        events = events_of(response)
        await anext(events)
        served.server.loop.close()
        *_, last, done = [event async for event in events]
    assert done == "DONE"
    assert last["meta_info"]["finish_reason"]["message"] == "The engine is shutting down."


def test_a_model_that_cannot_be_served_is_said_on_stderr(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["--model-path", str(tmp_path), "--port", "0"]) == 2
    assert "The engine cannot start" in capsys.readouterr().err


async def test_an_engine_that_an_agent_starts_asks_for_a_key_that_others_cannot_read(
    folders: list[Path],
) -> None:
    commands = EngineCommands("embedded", max_running=2, kv_tokens=256)
    command = commands.command(folders[0], "1")
    assert command.api_key not in (None, commands.command(folders[0], "1").api_key), "each start has its own"
    assert command.api_key not in " ".join(command.argv)
    async with EngineProcess(command, ready_within_s=GENEROUS_S, stop_within_s=5.0) as engine:
        async with engine.client() as client:
            await client.info()
        async with aiohttp.ClientSession() as session:
            for method, path in (("GET", "/model_info"), ("POST", "/generate"), ("POST", "/abort_request")):
                async with session.request(method, engine.url + path, json={}) as response:
                    assert response.status == 401, path
