"""The REST server on a real socket: streams that resume, clients that stall, ports, addresses and tokens."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from gyre.api.client import GyreClient
from gyre.api.rest import RestServer, broadcast, create_app
from gyre.errors import ConfigError, Unauthorized, Unreachable
from tests.doubles.standing_job import StandingJob
from tests.waits import GENEROUS_S

Start = Callable[..., str]


@pytest.fixture
def start(job: StandingJob) -> Iterator[Start]:
    servers: list[RestServer] = []

    def serve(
        *, token: str | None = None, port: int = 0, heartbeat_s: float = 15.0, fallback_to_any: bool = False
    ) -> str:
        app = create_app(job.master, token=token, heartbeat_s=heartbeat_s)
        server = RestServer(app, "127.0.0.1", port, token, fallback_to_any=fallback_to_any)
        servers.append(server)
        return server.start()

    yield serve
    for server in servers:
        server.stop()
        assert not server.is_alive


def test_it_listens_when_start_returns_and_not_after_stop(shared_job: StandingJob) -> None:
    server = RestServer(create_app(shared_job.master, token=None))
    url = server.start()
    assert httpx.get(f"{url}/healthz").json() == {"ok": True}
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")


def test_a_stream_goes_on_with_what_comes(start: Start, job: StandingJob) -> None:
    url = start()
    with GyreClient(url) as client:
        stream = client.stream("small", after=6)
        assert [next(stream)["seq"] for _ in range(2)] == [7, 8]
        threading.Timer(0.1, job.command, ["pause"]).start()
        event = next(stream)
        assert (event["seq"], event["kind"]) == (9, "PauseRequested")
        stream.close()


def test_a_stream_is_server_sent_events_and_resumes_after_the_last_id(start: Start) -> None:
    url = start()
    for path, headers in (
        ("events/stream", {"Last-Event-ID": "6"}),
        ("events", {"Last-Event-ID": "6", "Accept": "text/event-stream"}),
        ("events/stream?after=6", {}),
        ("events/stream?after=2", {"Last-Event-ID": "6"}),
    ):
        with httpx.stream("GET", f"{url}/api/v1/jobs/small/{path}", headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            fields = [line for line in (next(lines) for _ in range(6)) if line][1:]
            assert fields[:2] == ["id: 7", "event: VertexStarted"]
            assert json.loads(fields[2].removeprefix("data: "))["seq"] == 7


def test_a_quiet_stream_beats_and_its_end_is_noticed(start: Start, job: StandingJob) -> None:
    url = start(heartbeat_s=0.05)
    with httpx.stream("GET", f"{url}/api/v1/jobs/small/events/stream?after=8") as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": heartbeat"


def test_a_client_that_stalls_delays_nobody_and_misses_nothing(
    start: Start, job: StandingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "QUEUE_BATCHES", 2)
    url = start()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as stalled, GyreClient(url) as client:
        stalled.sendall(
            f"GET /api/v1/jobs/small/events/stream HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        )
        stream = client.stream("small", after=8)
        total = 3000
        blob = "x" * 4000  # 12 MB in all: more than socket buffers take

        def write() -> None:
            for number in range(total):
                job.do(job.world.report, "trainer-0", "Logged", {"number": number, "blob": blob})
            job.run_until(lambda view: view["seq"] == 8 + total)

        writer = threading.Thread(target=write)
        writer.start()
        assert [next(stream)["seq"] for _ in range(total)] == list(range(9, 9 + total))
        writer.join()
        stream.close()
        assert client.view("small")["seq"] == 8 + total
        stalled.settimeout(GENEROUS_S)
        last = f"id: {8 + total}\n".encode()
        seen = b""
        while last not in seen[-8192:]:
            part = stalled.recv(1 << 20)
            assert part, f"the stream ended after {len(seen)} bytes"
            seen += part
        numbers = [int(line[4:]) for line in seen.split(b"\n") if line.startswith(b"id: ")]
        assert numbers == list(range(1, 9 + total))


def test_many_streams_share_one_waiting_thread(start: Start, job: StandingJob) -> None:
    before = set(threading.enumerate())
    url = start()
    with GyreClient(url) as client:
        streams = [client.stream("small", after=7) for _ in range(30)]
        for stream in streams:
            assert next(stream)["seq"] == 8
        new = set(threading.enumerate()) - before
        assert len([thread for thread in new if thread.name.startswith("gyre-events")]) == 1
        job.command("pause")
        for stream in streams:
            assert next(stream)["seq"] == 9
            stream.close()


def test_a_slow_master_does_not_stop_health_or_streams(
    start: Start, job: StandingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers, view = threading.Event(), threading.Event(), job.master.view

    def slowly() -> dict[str, Any]:
        asked.set()
        assert answers.wait(GENEROUS_S)
        return view()

    url = start(heartbeat_s=0.05)
    with httpx.stream("GET", f"{url}/api/v1/jobs/small/events/stream?after=8") as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(":"))
        monkeypatch.setattr(job.master, "view", slowly)
        slow = threading.Thread(
            target=httpx.get, args=[f"{url}/api/v1/jobs/small"], kwargs={"timeout": GENEROUS_S}
        )
        slow.start()
        assert asked.wait(GENEROUS_S)
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert next(line for line in lines if line.startswith(":"))
        assert slow.is_alive(), "the master has not answered it yet"
        answers.set()
        slow.join()


def test_stop_ends_open_streams(shared_job: StandingJob) -> None:
    server = RestServer(create_app(shared_job.master, token=None))
    url = server.start()
    with GyreClient(url) as client:
        stream = client.stream("small", after=7)
        next(stream)
        threading.Timer(0.1, server.stop).start()
        with pytest.raises((StopIteration, Unreachable)):
            next(stream)


def test_a_port_in_use_is_one_sentence(start: Start, job: StandingJob) -> None:
    port = int(start().rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 is in use"):
        start(port=port)
    other = start(port=port, fallback_to_any=True)
    assert int(other.rpartition(":")[2]) != port


def test_a_restarted_server_gets_its_port_back(shared_job: StandingJob) -> None:
    first = RestServer(create_app(shared_job.master, token=None))
    url = first.start()
    httpx.get(f"{url}/healthz")
    first.stop()
    again = RestServer(
        create_app(shared_job.master, token=None), port=int(url.rpartition(":")[2]), fallback_to_any=True
    )
    assert again.start() == url
    again.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "gyre.example"])
@pytest.mark.parametrize("token", [None, ""])
def test_off_loopback_needs_a_token(shared_job: StandingJob, host: str, token: str | None) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        RestServer(create_app(shared_job.master, token=None), host, 0, token)


def test_an_address_of_another_machine_is_one_sentence(shared_job: StandingJob) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        RestServer(create_app(shared_job.master, token="t"), "192.0.2.1", 0, "t", plain_http=True).start()


def test_a_wildcard_with_a_token_is_served(shared_job: StandingJob) -> None:
    app = create_app(shared_job.master, token="t")
    server = RestServer(app, "0.0.0.0", 0, "t", advertise="127.0.0.1", plain_http=True)
    try:
        with GyreClient(server.start(), "t") as client:
            assert client.jobs()[0]["name"] == "small"
    finally:
        server.stop()


@pytest.mark.parametrize("given", [None, "wrong"])
def test_a_wrong_token_is_unauthorized(start: Start, given: str | None) -> None:
    url = start(token="right")
    calls: list[Callable[[GyreClient], Any]] = [
        lambda client: client.view("small"),
        lambda client: client.command("small", "pause"),
        lambda client: next(client.stream("small")),
    ]
    with GyreClient(url, given) as client:
        for call in calls:
            with pytest.raises(Unauthorized):
                call(client)
    with GyreClient(url, "right") as client:
        assert client.command("small", "pause") == 9
