"""An engine that says what no engine should: each answer ends as an EngineError, in time and in bounded memory.

`tests/fuzz/engine_replies.py` looks for more of them; these are those that it, or reading the code, found.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from gyre.engines.dialect import FinishKind, GenerateRequest, SamplingParams, StreamChunk
from gyre.engines.errors import EngineError, EngineProtocolError, EngineRefused, EngineTimeout
from gyre.engines.http_client import Deadlines, EngineClient
from gyre.engines.limits import RequestLimits
from gyre.rollouts.agent.held_samples import check_versions
from tests.engines.fake_engine import LENGTH, FakeEngine, Pause, Reply, event
from tests.waits import GENEROUS_S

STALL_S = 1.0
REQUEST = GenerateRequest("r" * 8, np.array([1, 2, 3], np.int32), SamplingParams(6))


async def hear(client: EngineClient) -> list[StreamChunk]:
    async with aclosing(client.generate(REQUEST)) as stream:
        return [chunk async for chunk in stream]


def patient(fake: FakeEngine) -> EngineClient:
    deadlines = Deadlines(answer_s=GENEROUS_S, pause_s=GENEROUS_S, update_s=GENEROUS_S, stall_s=GENEROUS_S)
    return EngineClient(fake.url, deadlines=deadlines, limits=RequestLimits(vocabulary=4096))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([b"data: " + b"x" * (1 << 20)] * 64, "an event of more than"),
        ([event([10, 11], 2, logprobs=[-1e308, -1e308])], "log-prob"),
        ([event([10], 1, logprobs=[-1e308])], "log-prob"),
        ([event([10], 1, logprobs=[0.5])], "log-prob 0.5"),
        ([event([-1], 1, finish=LENGTH)], "does not have"),
        ([event([4096], 1, finish=LENGTH)], "does not have"),
        ([event(range(1, 8), 7, finish=LENGTH)], "6 were asked for"),
        ([event([10], True)], "completion_tokens"),
        ([event([10], 1, output_token_logprobs=[[]])], "not a chunk"),
        ([event([10], 1, weight_version=7.5)], "no name"),
        ([event([10], 1, weight_version=["7"])], "no name"),
        ([event([10], 1, weight_version="9" * 5000)], "no name"),
        ([event([10], 1, finish={"type": [[[0]]]})], "no name"),
        (
            [event([10], 1, finish=LENGTH, weight_versions=[{"version": "1", "start": 0, "end": 1.0}])],
            "whole numbers",
        ),
    ],
)
async def test_a_stream_of_nonsense_is_an_error(parts: list[bytes], says: str) -> None:
    async with FakeEngine() as fake, patient(fake) as client:
        fake.streams(*parts)
        with pytest.raises(EngineProtocolError, match=says):
            await hear(client)


async def test_events_without_a_token_do_not_hold_a_stream_open() -> None:
    async with FakeEngine() as fake:
        fake.streams(*[event([], 0), Pause(0.2 * STALL_S)] * 100)
        async with EngineClient(fake.url, deadlines=Deadlines(stall_s=STALL_S)) as client:
            with pytest.raises(EngineTimeout):
                await asyncio.wait_for(hear(client), 15 * STALL_S)


async def test_what_an_abort_says_is_a_short_text() -> None:
    async with FakeEngine() as fake, patient(fake) as client:
        fake.streams(event([], 0, finish={"type": "abort", "message": {"detail": "x" * 70_000}}))
        (chunk,) = await hear(client)
    assert chunk.finish is not None
    assert (chunk.finish.kind, chunk.finish.message) == (FinishKind.ABORT, "x" * 300)


NESTED: dict[str, Any] = {"message": "deep"}
for _ in range(900):
    NESTED = {"error": NESTED}

LOAD = {
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "num_used_tokens": 100,
    "max_total_num_tokens": 1000,
    "max_running_requests": 8,
}


@pytest.mark.parametrize(
    ("call", "path", "reply", "kind"),
    [
        (EngineClient.load, "/v1/loads", Reply(b"[" * (17 << 20)), EngineProtocolError),
        (
            EngineClient.load,
            "/v1/loads",
            Reply({"loads": [LOAD | {"max_running_requests": 0}]}),
            EngineProtocolError,
        ),
        (
            EngineClient.load,
            "/v1/loads",
            Reply({"loads": [LOAD | {"num_used_tokens": 1e300}]}),
            EngineProtocolError,
        ),
        (EngineClient.resume, "/continue_generation", Reply(b"", 302), EngineProtocolError),
        (EngineClient.resume, "/continue_generation", Reply(NESTED, 400), EngineRefused),
        (hear, "/generate", Reply(b"", 302), EngineProtocolError),
        (EngineClient.weights_checksum, "/weights_checker", Reply(b"", 200), EngineProtocolError),
        (EngineClient.weights_checksum, "/weights_checker", Reply({}, 200), EngineProtocolError),
    ],
)
async def test_a_page_of_nonsense_is_an_error(
    call: Callable[[EngineClient], Awaitable[Any]], path: str, reply: Reply, kind: type[EngineError]
) -> None:
    async with FakeEngine() as fake, patient(fake) as client:
        fake.replies[path] = reply
        with pytest.raises(kind) as raised:
            await call(client)
        assert type(raised.value) is kind


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "dp_size", "nnodes"])
async def test_an_engine_does_not_have_a_billion_ranks(name: str) -> None:
    """The agent makes a list with an element for each."""
    async with FakeEngine() as fake, patient(fake) as client:
        fake.replies["/model_info"] = Reply({"model_path": "/m", "weight_version": "7"})
        fake.replies["/server_info"] = Reply({"version": "0.5.23", name: 10**9})
        with pytest.raises(EngineProtocolError, match="who it is"):
            await client.info()


@pytest.mark.parametrize(
    "body", [b"", json.dumps({"loads": [LOAD]}).encode()], ids=["a bomb", "honest bytes"]
)
async def test_nothing_is_decompressed(body: bytes) -> None:
    """A few kilobytes can be gigabytes. The client asks for none, and so takes none."""

    packed = gzip.compress(body or b" " * (64 << 20))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(packed) + packed)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(EngineProtocolError, match="broken JSON"):
                await client.load()


@pytest.mark.parametrize("told", ["3", "9" * 300])
def test_a_version_that_the_engine_was_never_given_is_refused(told: str) -> None:
    """The manager would refuse the report, and with it the agent."""
    nothing = np.empty(0, np.int32), np.empty(0, np.float32)
    check_versions(StreamChunk(*nothing, "2"), 2)
    check_versions(StreamChunk(*nothing, "early"), 2)
    with pytest.raises(EngineProtocolError, match="newest that it was given is 2"):
        check_versions(StreamChunk(*nothing, told), 2)
