"""What an engine answers: the events of a stream, its pages, and the raw bytes of HTTP.

An engine is a process of the job's own that runs other people's code. Whatever it says is read, or is an EngineError;
and what was read of a sample is a report that the rollout manager can decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from contextlib import aclosing
from random import Random
from typing import Any

import numpy as np
import orjson

from gyre.engines.dialect import GenerateRequest, PauseMode, SamplingParams, StreamChunk
from gyre.engines.errors import EngineError
from gyre.engines.http_client import Deadlines, EngineClient
from gyre.engines.replies import EventLines, ManyReader, StreamReader, info_of, load_of, said_no, words_of
from gyre.rollouts.agent.engine_limits import limits_of
from gyre.rollouts.agent.held_samples import HeldSample, check_versions
from gyre.rollouts.agent.reports import Reports
from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.progress import EndKind
from tests.engines.fake_engine import DONE, LENGTH, event
from tests.fuzz.http_bytes import STRANGE_CHUNKS, STRANGE_HEADERS
from tests.fuzz.inputs import as_json, damaged, hostile, hostile_json, noise, twisted
from tests.fuzz.manager_http import Told
from tests.fuzz.target import Broken, Target

VOCABULARY = 4096
MOST_TOKENS = 9
GIVEN = 2
"""The newest version that the engine was given."""

STREAMS: tuple[list[bytes], ...] = (
    [event([10], 1), event([11, 12, 13], 4), event([14, 15], 6, finish=LENGTH)],
    [
        event([10], 1),
        event([10, 11, 12], 3),
        event([10, 11, 12, 13], 4, finish={"type": "stop", "matched": 13}),
    ],
    [event([10, 11], 2), event([11], 2, finish={"type": "abort", "message": "called off"})],
    [event([], 0, finish={"type": "abort", "message": "queue full", "status_code": 503})],
    [
        event(
            [10, 11, 12],
            3,
            finish=LENGTH,
            weight_version="2",
            weight_versions=[{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
        )
    ],
    [b'data: {"error": {"message": "out of pages", "code": 500}}\n\n'],
)
TREES: list[list[Any]] = [[json.loads(one[5:]) for one in stream] for stream in STREAMS]

RANK = {
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "num_used_tokens": 100,
    "max_total_num_tokens": 1000,
    "max_running_requests": 8,
}
PAGES: dict[str, Any] = {
    "/v1/loads": {"loads": [RANK, RANK]},
    "/model_info": {"model_path": "/m", "weight_version": "7"},
    "/server_info": {
        "context_length": 4096,
        "max_req_input_len": 4090,
        "version": "0.5.23",
        "tp_size": 2,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "speculative_algorithm": None,
        "cuda_graph_config": {"decode": {"max_bs": 512, "backend": "full"}},
        "cuda_graph_max_bs": 160,
    },
    "/weights_checker": {"ranks": [{"checksum": "ab"}]},
    "/update_weights_from_disk": {"success": True, "message": ""},
}


def request(number: int = 0) -> GenerateRequest:
    return GenerateRequest(f"r{number:07d}", np.array([1, 2, 3], np.int32), SamplingParams(MOST_TOKENS))


def held(number: int) -> HeldSample:
    sample = HeldSample(
        key=number,
        row=number,
        lease=number + 1,
        prompt=np.array([1, 2, 3], np.int32),
        prior=np.empty(0, np.int32),
        sampling={"max_new_tokens": MOST_TOKENS},
        seed=1,
        rid=f"r{number:07d}",
        seen=1,
    )
    sample.asked(-1)
    return sample


def hostile_event(tree: Any, draw: Random) -> bytes:
    """The JSON of one event."""
    match draw.randrange(10):
        case 0:
            return hostile_json(tree, draw)
        case 1:
            return damaged(as_json(tree), draw)
        case 2:
            return as_json(hostile(draw, wide=True))
        case 3 | 4 | 5:
            return as_json(twisted(tree, draw, wide=True))
        case 6:
            return as_json(tree | {"index": draw.choice((0, 1, 2, -1, True, "0", None, 1 << 70))})
        case _:
            return as_json(tree)


class EngineEvents(Target):
    """The events of a stream, as the agent takes them into a sample and reports them."""

    name = "engine events"

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        count = draw.choice((1, 1, 3))
        data = b"".join(
            b"data: " + hostile_event(tree, draw) + draw.choice((b"\n\n", b"\n\n", b"\r\n\r\n", b"\n"))
            for tree in draw.choice(TREES) * draw.choice((1, 1, 2))
        )
        if draw.randrange(4) == 0:
            data = damaged(data, draw)
        sent.append(data)
        requests = [request(number) for number in range(count)]
        one = StreamReader(requests[0], VOCABULARY) if count == 1 else None
        many = ManyReader(requests, VOCABULARY)
        samples = [held(number) for number in range(count)]
        reports, lines = Reports(8), EventLines(1 << 20)
        good = True
        try:
            for piece in pieces(data, draw):
                for event in lines.feed(piece):
                    at, chunk = (0, one.read(event)) if one is not None else many.read(event)
                    self._took(samples[at], chunk)
        except EngineError as error:
            good = False
            self._failed(samples[0], error)
        for _ in range(2):
            frame, _ = reports.next(samples, everything=True, made_tokens=1, interval_s=0.25, now=1.0)
            if encode(decode(encode(frame))) != encode(frame):
                raise Broken("its report is another frame when it is read")
            if not np.isfinite(frame.logprobs).all():
                raise Broken("a log-prob that is no number")
            if len(frame.versions) and frame.versions.max() > GIVEN:
                raise Broken("a version that the engine was never given")
        return good

    def _took(self, sample: HeldSample, chunk: StreamChunk) -> None:
        """As `Generation` does."""
        if sample.end:
            return
        check_versions(chunk, GIVEN)
        sample.take(chunk, 1)
        if len(chunk.token_ids) and not 0 <= chunk.token_ids.min() <= chunk.token_ids.max() < VOCABULARY:
            raise Broken("a token that the model does not have")
        if sample.made > MOST_TOKENS:
            raise Broken("more tokens than were asked for")
        if chunk.finish is not None:
            ends: dict[str, EndKind] = {"abort": "released", "stop": "stop", "length": "length"}
            sample.end, sample.message = ends[chunk.finish.kind], chunk.finish.message

    def _failed(self, sample: HeldSample, error: EngineError) -> None:
        if not sample.end:
            sample.end, sample.message = "failed", str(error)[:2000]


def pieces(data: bytes, draw: Random) -> list[bytes]:
    """The same bytes, cut anywhere."""
    edges = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 1, 3, 9))))
    return [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]


class EnginePages(Target):
    """What an engine says of itself and of a call: limits that are a frame of the protocol, or an EngineError."""

    name = "engine pages"
    share = 0.5

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        pages = []
        for path in ("/v1/loads", "/model_info", "/server_info"):
            plain: Any = PAGES[path]
            if draw.randrange(2):
                plain = twisted(plain, draw, wide=True) if draw.randrange(5) else hostile(draw, wide=True)
            sent.append(as_json(plain))
            pages.append(parsed(sent[-1]))
        words = words_of(draw.choice((pages[0], {"error": pages[1]}, {"detail": pages[2]}, nested(draw))))
        if len(words) > 300 or not isinstance(str(said_no(draw.choice((400, 404, 500)), words, "it")), str):
            raise Broken("its words are too many")
        try:
            load, info = load_of(pages[0]), info_of(pages[1], pages[2])
            wanted = draw.choice((None, 1, 1 << 16))
            decode(encode(limits_of(load, info, max_running=wanted, kv_tokens=wanted)))
        except EngineError:
            return False
        return True


def parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:  # which the client refuses
        return None


def nested(draw: Random) -> Any:
    plain: Any = "deep"
    for _ in range(draw.choice((1, 5, 500, 1000))):
        plain = {draw.choice(("error", "detail", "message")): plain}
    return plain


class EngineHttp(Target):
    """The raw bytes that an engine answers with, and any of the calls of a client."""

    name = "engine over HTTP"
    share = 0.02
    traced = False
    DEADLINES = Deadlines(connect_s=5.0, answer_s=0.3, pause_s=0.3, update_s=0.3, stall_s=0.3)

    def start(self) -> None:
        self._told = Told("asyncio", "aiohttp")
        self._loop = asyncio.new_event_loop()
        self._said = b""
        self._holds = False
        self._answers: set[asyncio.StreamWriter] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()
        self._told.end()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(
                    (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")),
                    b":0",
                )
                await reader.readexactly(int(size.split(b":")[1]))
                for piece in self._pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._holds:
                    await asyncio.wait_for(reader.read(), 5.0)
        except TimeoutError:
            raise Broken("the client holds a connection that is over") from None
        finally:
            writer.close()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        sent.append(self._reply(draw))
        self._pieces = pieces(sent[0], draw)
        self._holds = draw.randrange(3) == 0
        try:
            self._loop.run_until_complete(self._ask(draw))
        except EngineError:
            return False
        finally:
            self._told.check()
        return True

    async def _ask(self, draw: Random) -> None:
        async with EngineClient(self._url, deadlines=self.DEADLINES) as client:
            calls: list[Any] = [
                client.load,
                client.info,
                client.is_ready,
                client.resume,
                client.freeze_gc,
                client.flush_cache,
                client.begin_weight_update,
                client.weights_checksum,
                lambda: client.pause(PauseMode.RETRACT),
                lambda: client.name_weights("3"),
                lambda: client.update_weights_from_disk("/w", "2", flush_cache=False),
                lambda: client.update_weights_from_tensor(["gASVAA=="], load_format="a"),
                lambda: self._hear(client.generate(request())),
                lambda: self._hear(client.generate_many([request(0), request(1)])),
            ]
            await draw.choice([*calls, calls[-1], calls[-2], calls[-2]])()

    async def _hear(self, stream: Any) -> None:
        async with aclosing(stream) as chunks:
            async for _ in chunks:
                pass

    def _reply(self, draw: Random) -> bytes:
        if draw.randrange(12) == 0:
            return noise(draw, 400)
        body = b"".join(draw.choice(STREAMS)) + DONE
        if draw.randrange(2):
            body = hostile_json(draw.choice(list(PAGES.values())), draw)
        status = draw.choice((b"200 OK",) * 6 + STATUSES)
        lines = [draw.choice(STRANGE_HEADERS) for _ in range(draw.choice((0, 0, 1, 2)))]
        match draw.randrange(6):
            case 0:
                lines.append(b"Transfer-Encoding: chunked")
                body = draw.choice((*STRANGE_CHUNKS, chunked(body, draw), chunked(body, draw)))
            case 1:
                kind, pack = draw.choice(
                    ((b"gzip", gzip.compress), (b"deflate", zlib.compress), (b"br", bytes))
                )
                lines.append(b"Content-Encoding: " + kind)
                body = pack(body if draw.randrange(3) else b"[" * (1 << 20))
                lines.append(b"Content-Length: %d" % len(body))
            case 2 | 3:
                lines.append(b"Content-Length: %d" % (len(body) + draw.choice((0, 0, 0, 1, -1, 1 << 40))))
            case _:
                pass  # until the connection ends
        lines.append(b"Content-Type: " + draw.choice(TYPES))
        if draw.randrange(4) == 0:
            lines.append(
                draw.choice(
                    (b"Set-Cookie: a=b; Domain=..", b"Location: http://127.0.0.1:1/", b"Connection: close")
                )
            )
        data = b"HTTP/1.1 " + status + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + body
        if draw.randrange(6) == 0:
            data = b"HTTP/1.1 100 Continue\r\n\r\n" * draw.choice((1, 50)) + data
        return damaged(data, draw) if draw.randrange(6) == 0 else data


def chunked(body: bytes, draw: Random) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces(body, draw) if one) + b"0\r\n\r\n"


STATUSES = (
    b"101 Switching Protocols",
    b"103 Early",
    b"204 No Content",
    b"206 Partial",
    b"302 Found",
    b"304 Not Modified",
    b"400 Bad",
    b"401 Who",
    b"404 Not Found",
    b"405 No",
    b"500 Broken",
    b"503 Later",
    b"599 Odd",
    b"000 None",
    b"999 Most",
    b"9999999999 Many",
    b"-1 Less",
)
TYPES = (
    b"application/json",
    b"text/event-stream",
    b"text/plain; charset=none-such",
    b"application/json; charset=hex",
    b"\xff",
    b"a/b/c;;;=",
    b"",
)
