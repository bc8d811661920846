"""The client against an engine that misbehaves on purpose, and against what the real SGLang once said."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engines.dialect import (
    EngineInfo,
    EngineLoad,
    Finish,
    FinishKind,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    StreamChunk,
    VersionSpan,
)
from gyre.engines.errors import (
    EngineError,
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from gyre.engines.http_client import Deadlines, EngineClient
from gyre.engines.replies import EventLines, ManyReader, StreamReader
from gyre.errors import ConfigError
from tests.engines.fake_engine import DONE, LENGTH, Cut, FakeEngine, Pause, Reply, Silence, event
from tests.waits import GENEROUS_S

RECORDED = Path(__file__).with_name("recorded")
TOKENS = [10, 11, 12, 13, 14, 15]

IMPATIENT_S = 1.0
"""Long enough for an engine on a busy machine to say its first word, and short enough to be waited for."""

REQUEST = GenerateRequest("r" * 8, np.array([1, 2, 3], np.int32), SamplingParams(6))

INCREMENTAL = [
    event([10], 1),
    event([11, 12, 13], 4),
    event([14, 15], 6, finish=LENGTH),
]
CUMULATIVE = [
    event(TOKENS[:1], 1),
    event(TOKENS[:4], 4),
    event(TOKENS, 6, finish=LENGTH),
]


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as fake:
        yield fake


@pytest.fixture
async def client(fake: FakeEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(fake.url, deadlines=Deadlines(answer_s=GENEROUS_S, stall_s=GENEROUS_S)) as client:
        yield client


@pytest.fixture
async def impatient(fake: FakeEngine) -> AsyncIterator[EngineClient]:
    """For what is silent on purpose."""
    async with EngineClient(
        fake.url, deadlines=Deadlines(answer_s=IMPATIENT_S, stall_s=IMPATIENT_S)
    ) as client:
        yield client


async def hear(
    client: EngineClient, into: list[StreamChunk] | None = None, request: GenerateRequest = REQUEST
) -> list[StreamChunk]:
    chunks = [] if into is None else into
    async with aclosing(client.generate(request)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
    return chunks


def tokens_of(chunks: list[StreamChunk]) -> list[int]:
    for chunk in chunks:
        assert chunk.token_ids.dtype == np.int32
        assert chunk.logprobs.dtype == np.float32
        np.testing.assert_allclose(chunk.logprobs, -chunk.token_ids / 64)
    return [int(token) for chunk in chunks for token in chunk.token_ids]


# Streams that are well


@pytest.mark.parametrize(
    "parts",
    [
        INCREMENTAL,
        CUMULATIVE,
        [b"".join(INCREMENTAL)],
        [b"".join(CUMULATIVE)],
        [event(TOKENS, 6, finish=LENGTH)],
        [event([], 0), *INCREMENTAL],
        [event(TOKENS, 6), event([], 6, finish=LENGTH)],
        [event(TOKENS, 6), event(TOKENS, 6, finish=LENGTH)],
        [INCREMENTAL[0], b": still here\n\n", *INCREMENTAL[1:]],
        [part.replace(b"\n", b"\r\n") for part in INCREMENTAL],
        [INCREMENTAL[0], INCREMENTAL[1][:50], Pause(0.02), INCREMENTAL[1][50:], INCREMENTAL[2]],
    ],
    ids=[
        "incremental",
        "cumulative",
        "incremental in one read",
        "cumulative in one read",
        "one chunk",
        "empty at first",
        "empty at last",
        "nothing new at last",
        "comments",
        "CRLF",
        "an event in two reads",
    ],
)
async def test_each_token_comes_once_however_the_server_streams(
    fake: FakeEngine, client: EngineClient, parts: list[Any]
) -> None:
    fake.streams(*parts, DONE)
    chunks = await hear(client)
    assert tokens_of(chunks) == TOKENS
    assert chunks[-1].finish == Finish(FinishKind.LENGTH)
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("stops", "ignored", "finish"),
    [
        ((2, 15), False, Finish(FinishKind.STOP, matched=15)),
        ((14,), False, Finish(FinishKind.LENGTH)),
        ((15,), True, Finish(FinishKind.LENGTH)),
    ],
    ids=["its last token is one", "one before it is", "they are ignored"],
)
@pytest.mark.parametrize(
    "parts",
    [INCREMENTAL, CUMULATIVE, [event(TOKENS, 6), event([], 6, finish=LENGTH)]],
    ids=["incremental", "cumulative", "nothing new at last"],
)
async def test_a_stop_token_that_is_the_last_allowed_stops(
    fake: FakeEngine,
    client: EngineClient,
    parts: list[bytes],
    stops: tuple[int, ...],
    ignored: bool,
    finish: Finish,
) -> None:
    """SGLang 0.5.17 says `length` here. The answers whose ends just fit would then all count as cut off."""
    fake.streams(*parts, DONE)
    sampling = SamplingParams(6, stop_token_ids=stops, ignore_eos=ignored)
    request = replace(REQUEST, sampling=sampling)
    chunks = await hear(client, request=request)
    assert tokens_of(chunks) == TOKENS
    assert chunks[-1].finish == finish
    together = ManyReader([request])
    read = [together.read(line)[1] for part in parts for line in EventLines(1 << 20).feed(part)]
    assert read[-1].finish == finish


ABORTED = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize(
    "parts",
    [
        [event([10], 1), event([11, 12], 3), event([12], 3, finish=ABORTED)],
        [
            event([10], 1),
            event(
                [11, 12, 12],
                3,
                finish=ABORTED,
                output_token_logprobs=[[-token / 64, token, None] for token in (11, 12, 10, 11, 12)],
            ),
        ],
        [event([10], 1), event([10, 11, 12], 3, finish=ABORTED)],
    ],
    ids=["alone", "behind new ones", "cumulative"],
)
async def test_the_token_that_an_abort_repeats_is_not_new(
    fake: FakeEngine, client: EngineClient, parts: list[bytes]
) -> None:
    """SGLang, when it aborts a request that waits again after a retraction: its list of log-probs is whole then."""
    fake.streams(*parts, DONE)
    chunks = await hear(client)
    assert tokens_of(chunks) == [10, 11, 12]
    assert chunks[-1].finish == Finish(FinishKind.ABORT, "Abort in waiting queue")


async def test_an_abort_before_the_first_token_is_an_empty_chunk(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.streams(event([], 0, finish=ABORTED, weight_versions=[{"version": "1", "start": 0, "end": 0}]), DONE)
    (chunk,) = await hear(client)
    assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.spans) == 0
    assert chunk.finish == Finish(FinishKind.ABORT, "Abort in waiting queue")


async def test_the_last_chunk_says_which_version_made_which_token(
    fake: FakeEngine, client: EngineClient
) -> None:
    rows = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 6}]
    fake.streams(
        event(TOKENS, 6, finish={"type": "stop", "matched": 15}, weight_versions=rows, weight_version="2"),
        DONE,
    )
    (chunk,) = await hear(client)
    assert chunk.spans == (VersionSpan("1", 0, 2), VersionSpan("2", 2, 6))
    assert chunk.weight_version == "2"
    assert chunk.finish == Finish(FinishKind.STOP, matched=15)


async def test_a_finished_sample_is_whole_whatever_comes_after(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.streams(*INCREMENTAL, Cut)
    assert tokens_of(await hear(client)) == TOKENS


async def test_the_connection_is_used_again(fake: FakeEngine, client: EngineClient) -> None:
    fake.streams(*INCREMENTAL, DONE)
    for _ in range(3):
        await hear(client)
    assert len(fake.connections) == 1


async def test_what_is_asked_is_what_sglang_knows(fake: FakeEngine, client: EngineClient) -> None:
    fake.streams(*INCREMENTAL, DONE)
    sampling = SamplingParams(6, 0.5, 0.9, 20, 0.1, (7, 8), ignore_eos=True, sampling_seed=5)
    async for _ in client.generate(GenerateRequest("abc", np.arange(6, dtype=np.int32)[::2], sampling)):
        pass
    assert fake.asked == [
        (
            "POST",
            "/generate",
            {
                "rid": "abc",
                "input_ids": [0, 2, 4],
                "sampling_params": {
                    "max_new_tokens": 6,
                    "temperature": 0.5,
                    "top_p": 0.9,
                    "top_k": 20,
                    "min_p": 0.1,
                    "stop_token_ids": [7, 8],
                    "ignore_eos": True,
                    "sampling_seed": 5,
                },
                "stream": True,
                "return_logprob": True,
            },
        )
    ]


async def test_a_slow_consumer_is_no_stall(fake: FakeEngine, impatient: EngineClient) -> None:
    fake.streams(*INCREMENTAL, DONE)
    seen = 0
    async for chunk in impatient.generate(REQUEST):
        seen += len(chunk.token_ids)
        await asyncio.sleep(1.3 * IMPATIENT_S)
    assert seen == 6


async def test_leaving_early_closes_the_connection(fake: FakeEngine, client: EngineClient) -> None:
    fake.streams(INCREMENTAL[0], Silence)
    async with aclosing(client.generate(REQUEST)) as stream:
        async for _ in stream:
            break
    await asyncio.wait_for(fake.left.wait(), GENEROUS_S)


async def test_cancelling_the_consumer_closes_the_connection(fake: FakeEngine, client: EngineClient) -> None:
    fake.streams(INCREMENTAL[0], Silence)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await hear(client)
    await asyncio.wait_for(fake.left.wait(), GENEROUS_S)


@given(st.lists(st.integers(1, 300), max_size=20), st.booleans())
def test_events_do_not_depend_on_how_the_bytes_are_cut(sizes: list[int], cumulative: bool) -> None:
    data = b"".join(CUMULATIVE if cumulative else INCREMENTAL) + DONE
    lines, reader, chunks = EventLines(1 << 20), StreamReader(REQUEST), []
    for size in [*sizes, len(data)]:
        piece, data = data[:size], data[size:]
        chunks += [reader.read(line) for line in lines.feed(piece)]
    assert lines.done
    assert tokens_of(chunks) == TOKENS


async def test_a_call_is_repeated_on_a_new_connection_where_a_kept_one_breaks(
    fake: FakeEngine, client: EngineClient
) -> None:
    """The engine's server closes a connection in the moment in which it is used again."""
    fake.replies["/continue_generation"] = Reply({"status": "ok"}, cuts=1)
    await client.resume()
    assert [path for _, path, _ in fake.asked] == ["/continue_generation"] * 2
    fake.replies["/continue_generation"] = Reply({"status": "ok"}, cuts=2)
    with pytest.raises(EngineUnreachable, match="broke"):
        await client.resume()


# Streams that are not


@pytest.mark.parametrize(
    ("parts", "kind", "says", "before"),
    [
        ([*INCREMENTAL[:2], Cut], EngineUnreachable, "broke", 4),
        (INCREMENTAL[:2], EngineProtocolError, "without a finish", 4),
        ([*INCREMENTAL[:2], DONE], EngineProtocolError, "without a finish", 4),
        ([INCREMENTAL[0], INCREMENTAL[1][:-9]], EngineProtocolError, "without a finish", 1),
        ([], EngineProtocolError, "without a finish", 0),
        ([INCREMENTAL[0], Silence], EngineTimeout, "said nothing for 1 s", 1),
        (
            [INCREMENTAL[0], *[b": still here\n\n", Pause(0.3 * IMPATIENT_S)] * 9],
            EngineTimeout,
            "said nothing",
            1,
        ),
        ([INCREMENTAL[0], *[b'data: {"', Pause(0.3 * IMPATIENT_S)] * 9], EngineTimeout, "said nothing", 1),
        ([INCREMENTAL[0], b"data: {nonsense}\n\n"], EngineProtocolError, "no JSON", 1),
        ([INCREMENTAL[0], b"data: [1, 2]\n\n"], EngineProtocolError, "not a chunk", 1),
        ([INCREMENTAL[0], b"data: {}\n\n"], EngineProtocolError, "'meta_info'", 1),
        ([event([10, 11], 3)], EngineProtocolError, "2 output_ids", 0),
        ([INCREMENTAL[0], event([11, 12], 4)], EngineProtocolError, "2 output_ids", 1),
        ([INCREMENTAL[1], event([10], 1)], EngineProtocolError, "2 output_ids|3 output_ids", 0),
        ([event(TOKENS[:4], 4), event([10], 1)], EngineProtocolError, "fell from 4 to 1", 4),
        ([event([10, 11], 2, logprobs=[-1])], EngineProtocolError, "output_ids|output_token_logprobs", 0),
        ([event([10], 1, output_token_logprobs_length=2)], EngineProtocolError, "logprobs", 0),
        ([event([10], 1, output_token_logprobs=[[-1, 99, None]])], EngineProtocolError, "other tokens", 0),
        ([event([10], 1, output_token_logprobs=None)], EngineProtocolError, "not a chunk", 0),
        ([event([10], 1, logprobs=[None])], EngineProtocolError, "log-prob None", 0),
        ([event([10], 1, logprobs=[float("nan")])], EngineProtocolError, "no JSON", 0),
        ([event([10], 1, logprobs=["-1"])], EngineProtocolError, "not a chunk", 0),
        ([event([10.5], 1)], EngineProtocolError, "not a chunk", 0),
        ([event([1 << 40], 1)], EngineProtocolError, "not a chunk", 0),
        ([event([10], 1, finish={"type": "tired"})], EngineProtocolError, "tired", 0),
        (
            [event([10], 1, finish=LENGTH, weight_versions=[{"version": "1", "start": 0, "end": 2}])],
            EngineProtocolError,
            "do not cover",
            0,
        ),
        (
            [INCREMENTAL[0], b'data: {"error": {"message": "out of pages", "code": 500}}\n\n', DONE],
            EngineFailed,
            "out of pages",
            1,
        ),
        (
            [b'data: {"error": {"message": "too long", "code": 400, "retryable": false}}\n\n', DONE],
            EngineRefused,
            "too long",
            0,
        ),
        (
            [event([], 0, finish={"type": "abort", "message": "queue full", "status_code": 503})],
            EngineFailed,
            "queue full",
            0,
        ),
        (
            [event([], 0, finish={"type": "abort", "message": "too long", "status_code": 400})],
            EngineRefused,
            "too long",
            0,
        ),
    ],
)
async def test_a_broken_stream_is_an_error_and_what_came_before_stands(
    fake: FakeEngine,
    client: EngineClient,
    impatient: EngineClient,
    parts: list[Any],
    kind: type[EngineError],
    says: str,
    before: int,
) -> None:
    fake.streams(*parts)
    chunks: list[StreamChunk] = []
    with pytest.raises(kind, match=says) as raised:
        await hear(impatient if kind is EngineTimeout else client, chunks)
    assert type(raised.value) is kind
    assert tokens_of(chunks) == TOKENS[:before]


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (Reply({"error": "unknown field `x`"}, 400), EngineRefused, "unknown field `x`"),
        (Reply({"error": {"message": "too long"}}, 400), EngineRefused, "400 too long"),
        (Reply({"detail": [{"msg": "field required"}]}, 422), EngineRefused, "field required"),
        (Reply(b"no", 401, content_type="text/plain"), EngineRefused, "401 no Give the API key"),
        (Reply(b"", 404), EngineRefused, "does not speak this part"),
        (Reply(b"Internal Server Error", 500, content_type="text/plain"), EngineFailed, "Internal Server"),
        (Reply(b"{broken", 503), EngineProtocolError, "broken JSON"),
    ],
)
async def test_a_refusal_has_the_engines_words(
    fake: FakeEngine, client: EngineClient, reply: Reply, kind: type[EngineError], says: str
) -> None:
    fake.replies["/generate"] = reply
    with pytest.raises(kind, match=says) as raised:
        await hear(client)
    assert pickle.loads(pickle.dumps(raised.value)).details == raised.value.details


async def test_an_engine_that_accepts_and_says_nothing_is_a_timeout(
    fake: FakeEngine, impatient: EngineClient
) -> None:
    fake.replies |= {path: Reply(silent=True) for path in ("/generate", "/v1/loads", "/ready")}
    with pytest.raises(EngineTimeout):
        await hear(impatient)
    with pytest.raises(EngineTimeout):
        await impatient.load()
    assert not await impatient.is_ready()


async def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with EngineClient(url) as client:
        assert not await client.is_ready()
        with pytest.raises(EngineUnreachable, match="may be dead"):
            await hear(client)
        with pytest.raises(EngineUnreachable):
            await client.load()


async def test_a_client_that_is_held_up_while_it_connects_tries_again(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this process goes on, the deadline of connecting is over, though the engine accepted at once."""
    loop = asyncio.get_running_loop()
    connect, dialled = loop.sock_connect, []

    async def held_up(to: socket.socket, address: Any) -> None:
        dialled.append(address)
        if len(dialled) == 1:
            loop.call_soon(time.sleep, 2 * deadlines.connect_s)
        await connect(to, address)

    monkeypatch.setattr(loop, "sock_connect", held_up)
    fake.streams(*INCREMENTAL)
    deadlines = Deadlines(connect_s=IMPATIENT_S, answer_s=GENEROUS_S, stall_s=GENEROUS_S)
    async with EngineClient(fake.url, deadlines=deadlines) as client:
        assert tokens_of(await hear(client)) == TOKENS
    assert len(dialled) == 2


def test_a_url_without_a_scheme_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="starts with http"):
        EngineClient("localhost:30000")


# The other calls


async def test_calls_ask_what_sglang_knows(fake: FakeEngine, client: EngineClient) -> None:
    fake.replies |= {
        "/abort_request": Reply(b""),
        "/pause_generation": Reply({"message": "paused", "status": "ok"}),
        "/continue_generation": Reply({"message": "continued", "status": "ok"}),
        "/update_weights_from_disk": Reply({"success": True, "message": "", "num_paused_requests": 0}),
        "/flush_cache": Reply(b"Cache flushed.\n", content_type="text/plain"),
    }
    await client.abort("r1")
    await client.abort_all()
    await client.pause(PauseMode.IN_PLACE)
    await client.resume()
    await client.update_weights_from_disk(Path("/w/7"), "7", flush_cache=False)
    await client.flush_cache()
    assert fake.asked == [
        ("POST", "/abort_request", {"rid": "r1"}),
        ("POST", "/abort_request", {"rid": "", "abort_all": True}),
        ("POST", "/pause_generation", {"mode": "in_place"}),
        ("POST", "/continue_generation", {"torch_empty_cache": False}),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/w/7", "weight_version": "7", "flush_cache": False},
        ),
        ("POST", "/flush_cache", {}),
    ]


@pytest.mark.parametrize(("status", "known"), [(200, True), (404, False), (405, False)])
async def test_an_engine_that_cannot_freeze_its_garbage_collector_is_no_error(
    fake: FakeEngine, client: EngineClient, status: int, known: bool
) -> None:
    fake.replies["/freeze_gc"] = Reply(b"", status, content_type="text/plain")
    assert await client.freeze_gc() == known
    assert fake.asked == [("POST", "/freeze_gc", {})]
    fake.replies["/freeze_gc"] = Reply(b"", 401, content_type="text/plain")
    with pytest.raises(EngineRefused):
        await client.freeze_gc()


async def test_load_is_the_sum_over_ranks(fake: FakeEngine, client: EngineClient) -> None:
    rank = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_used_tokens": 100,
        "max_total_num_tokens": 1000,
        "max_running_requests": 8,
    }
    fake.replies["/v1/loads"] = Reply({"loads": [rank, rank]})
    assert await client.load() == EngineLoad(4, 2, 200, 2000, 16)
    fake.replies["/v1/loads"] = Reply({"loads": [{}]})
    with pytest.raises(EngineProtocolError, match="num_running_reqs"):
        await client.load()


async def test_info_is_what_two_pages_say(fake: FakeEngine, client: EngineClient) -> None:
    fake.replies["/model_info"] = Reply({"model_path": "/m", "weight_version": "7"})
    fake.replies["/server_info"] = Reply({"context_length": 4096, "version": "0.5.23"})
    assert await client.info() == EngineInfo("/m", "7", 4096, "0.5.23")
    for told, graphs in (
        ({"cuda_graph_config": {"decode": {"max_bs": 512}}}, 512),
        ({"cuda_graph_max_bs": 160}, 160),
        ({"cuda_graph_max_bs": 160, "disable_cuda_graph": True}, None),
        ({"cuda_graph_config": {"decode": {"max_bs": 512, "backend": "disabled"}}}, None),
    ):
        fake.replies["/server_info"] = Reply({"version": "0.5.17"} | told)
        assert (await client.info()).graphs_up_to == graphs
    fake.replies["/server_info"] = Reply(b"<html>", content_type="text/html")
    with pytest.raises(EngineProtocolError, match="who it is"):
        await client.info()


async def test_weights_that_were_not_loaded_are_refused(fake: FakeEngine, client: EngineClient) -> None:
    said = {"success": False, "message": "no such folder", "num_paused_requests": 0}
    for status in (200, 400):
        fake.replies["/update_weights_from_disk"] = Reply(said, status)
        with pytest.raises(EngineRefused, match="no such folder"):
            await client.update_weights_from_disk("/w/8", "8", flush_cache=True)


@pytest.mark.parametrize(
    ("replies", "ready"),
    [
        ({"/ready": Reply(b"")}, True),
        ({"/ready": Reply(b"", 503)}, False),
        ({"/model_info": Reply({})}, True),
        ({}, False),
    ],
    ids=["ready", "not yet", "before SGLang had /ready", "no engine"],
)
async def test_readiness(
    fake: FakeEngine, client: EngineClient, replies: dict[str, Reply], ready: bool
) -> None:
    fake.replies |= replies
    assert await client.is_ready() is ready


async def test_the_key_is_sent(fake: FakeEngine) -> None:
    async with EngineClient(fake.url, api_key="secret") as client:
        assert client._headers["Authorization"] == "Bearer secret"


# What the real SGLang said (tests/sglang/record.py writes these files)


def recordings(kind: str) -> list[Any]:
    return [
        pytest.param(json.loads(path.read_text()), id=path.stem)
        for path in sorted(RECORDED.glob(f"{kind}_*.json"))
    ]


@pytest.mark.parametrize("recorded", recordings("stream"))
async def test_recorded_streams_are_understood(
    fake: FakeEngine, client: EngineClient, recorded: dict[str, Any]
) -> None:
    fake.streams(*(line.encode() for line in recorded["events"]))
    if recorded["expected"].get("error"):
        with pytest.raises(EngineError) as raised:
            await hear(client)
        assert raised.value.code == recorded["expected"]["error"]
        return
    asked = recorded["request"]["sampling_params"]
    sampling = SamplingParams(
        asked["max_new_tokens"],
        stop_token_ids=tuple(asked.get("stop_token_ids", ())),
        ignore_eos=asked["ignore_eos"],
    )
    chunks = await hear(client, request=replace(REQUEST, sampling=sampling))
    assert [int(token) for chunk in chunks for token in chunk.token_ids] == recorded["expected"]["tokens"]
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.kind == recorded["expected"]["finish"]
    assert [[span.version, span.start, span.end] for span in chunks[-1].spans] == recorded["expected"][
        "spans"
    ]


@pytest.mark.parametrize("recorded", recordings("reply"))
async def test_recorded_replies_are_understood(
    fake: FakeEngine, client: EngineClient, recorded: dict[str, Any]
) -> None:
    for page in recorded["pages"]:
        fake.replies[page["path"]] = Reply(
            page["body"].encode(), page["status"], content_type=page["content_type"] or "text/plain"
        )
    calls = {
        "load": client.load,
        "info": client.info,
        "abort": lambda: client.abort("x"),
        "pause": lambda: client.pause(PauseMode.RETRACT),
        "resume": client.resume,
        "flush_cache": client.flush_cache,
        "update": lambda: client.update_weights_from_disk("/w", "2", flush_cache=True),
        "generate": lambda: hear(client),
    }
    call = calls[recorded["call"]]
    if recorded["error"]:
        with pytest.raises(EngineError) as raised:
            await call()
        assert raised.value.code == recorded["error"]
    else:
        await call()
