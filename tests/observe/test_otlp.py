"""Traces of OpenTelemetry are as the protocol has it, are the same when told twice, and reach a collector whole."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.home import Home
from gyre.config import parse_job
from gyre.errors import ConfigError, Unreachable
from gyre.extras import installed
from gyre.observe import otlp_export
from gyre.observe.otlp import otlp_of
from gyre.observe.otlp_export import PROTO, encoded, send
from gyre.observe.sinks import process
from gyre.observe.sinks.following import read_cursor
from gyre.observe.sinks.otlp_sink import ENDPOINT, SETTLES_IN_S, OtlpSink
from gyre.observe.sinks.process import SinkSettings
from gyre.observe.sinks.sink import SinkJob
from gyre.observe.timeline import Timeline
from gyre.store import StepRow, open_store
from tests.observe.test_trace import SINCE, STEPS, WAYS, at, timeline

HAS_PROTO = installed(PROTO)


class Collector:
    """A collector of OTLP over HTTP on this machine, which keeps the spans that it gets."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.spans: list[dict[str, Any]] = []
        self.answer: tuple[int, str, bytes] = (200, "", b"")
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.append(self.path)
                collector.headers.append(dict(self.headers))
                collector.spans += spans_in(self.headers["Content-Type"], body)
                status, kind, said = collector.answer
                self.send_response(status)
                self.send_header("Content-Type", kind or self.headers["Content-Type"])
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *args: Any) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def spans_in(kind: str, body: bytes) -> list[dict[str, Any]]:
    """The spans of a request: ids in hex, attributes and events by name, as either form has them."""
    if kind == "application/x-protobuf":
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        return [
            {
                "trace": span.trace_id.hex(),
                "id": span.span_id.hex(),
                "parent": span.parent_span_id.hex(),
                "name": span.name,
                "begin": span.start_time_unix_nano,
                "end": span.end_time_unix_nano,
                "about": {
                    one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes
                },
                "events": [(one.name, one.time_unix_nano) for one in span.events],
            }
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    assert kind == "application/json"
    return plain_spans(json.loads(body))


def plain_spans(request: dict[str, Any]) -> list[dict[str, Any]]:
    def value(told: dict[str, Any]) -> Any:
        ((kind, found),) = told.items()
        return int(found) if kind == "intValue" else found

    return [
        {
            "trace": span["traceId"],
            "id": span["spanId"],
            "parent": span.get("parentSpanId", ""),
            "name": span["name"],
            "begin": int(span["startTimeUnixNano"]),
            "end": int(span["endTimeUnixNano"]),
            "about": {one["key"]: value(one["value"]) for one in span["attributes"]},
            "events": [(one["name"], int(one["timeUnixNano"])) for one in span.get("events", [])],
        }
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("GYRE_URL", "GYRE_TOKEN", "GYRE_STORE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GYRE_HOME", str(tmp_path))
    return Home(tmp_path)


@pytest.fixture
def job(home: Home) -> str:
    """A stored job with two steps, and nothing else."""
    with open_store(home.database_url()) as store:
        store.create_job(job_id="j1", name="grpo", spec={"name": "grpo"}, now=SINCE)
        ledger = store.ledger("j1")
        ledger.take_over(term=1)
        for step in STEPS[:2]:
            ledger.write(1, steps=[StepRow(step["step"], step["step"], "d", (), step, 0.0)])
    return "grpo"


def told(**more: Any) -> list[dict[str, Any]]:
    request = otlp_of(timeline(), STEPS[:2], WAYS, **{"job_id": "j1", "name": "grpo", **more})
    assert json.loads(json.dumps(request, allow_nan=False)) == request
    return plain_spans(request)


def nano(seconds: float) -> int:
    return round(at(seconds) * 10**9)


# -- what it says -----------------------------------------------------------------------------------


def test_each_step_is_a_trace_whose_spans_lie_within_it() -> None:
    spans = told()
    assert all(re.fullmatch("[0-9a-f]{32}", span["trace"]) for span in spans)
    assert all(re.fullmatch("[0-9a-f]{16}", span["id"]) for span in spans)
    assert max(Counter(span["id"] for span in spans).values()) == 1
    roots = {span["trace"]: span for span in spans if not span["parent"]}
    assert [root["name"] for root in roots.values()] == ["step 1", "step 2"]
    known = {span["id"]: span for span in spans}
    for span in spans:
        assert span["begin"] <= span["end"]
        if span["parent"]:
            parent = known[span["parent"]]
            assert parent["trace"] == span["trace"]
            assert parent["begin"] <= span["begin"] <= span["end"] <= parent["end"]


def test_the_root_has_the_metrics_and_the_incidents_of_its_step() -> None:
    first, second = (span for span in told() if not span["parent"])
    assert first["about"] == {"step": 1, "at": at(10.0), "seconds": 10.0, "reward_mean": 0.25}
    assert (first["begin"], first["end"]) == (nano(0.0), nano(10.0))
    assert first["events"] == [("incident", nano(4.0)), ("publish", nano(10.0))]
    assert (second["begin"], second["events"]) == (nano(9.5), [("publish", nano(10.0))])


def test_below_it_is_what_each_did_by_role_and_the_ways_of_its_samples() -> None:
    of_first = [span for span in told() if span["trace"] == told()[0]["trace"]]
    lanes = {span["name"]: span for span in of_first if "gyre.state" in span["about"]}
    assert set(lanes) == {
        "trainer train",
        "actor wait",
        "actor train",
        "rollout generate",
        "rollout down",
        "instances load",
    }
    assert lanes["actor wait"]["about"] == {
        "gyre.role": "actor",
        "gyre.vertex": "actor-0",
        "gyre.state": "wait",
        "gyre.cause": "rollout (generating)",
    }
    assert lanes["rollout down"]["about"]["gyre.instance"] == "rollout-1"
    (sample,) = [span for span in of_first if span["name"] == "sample 7/0"]
    parts = [span for span in of_first if span["parent"] == sample["id"]]
    assert [(span["about"]["gyre.instance"], span["about"]["gyre.tokens"]) for span in parts] == [
        ("rollout-1", 6),
        ("rollout-0", 2),
    ]


def test_told_twice_it_is_the_same_and_of_another_job_it_is_not() -> None:
    assert told() == told()
    ids = {span["id"] for span in told()} | {span["trace"] for span in told()}
    others = told(job_id="j2")
    assert not ids & ({span["id"] for span in others} | {span["trace"] for span in others})


def test_a_step_that_cannot_be_placed_is_left_out() -> None:
    steps = [{"step": 1}, {"step": 2, "at": None}, {"step": 3, "at": float("nan")}]
    empty = Timeline(SINCE, SINCE, SINCE, SINCE, [], [], False)
    assert plain_spans(otlp_of(empty, steps, job_id="j1")) == []


@pytest.mark.skipif(not HAS_PROTO, reason="the extra otel is not installed")
def test_as_protobuf_it_says_the_same() -> None:
    request = otlp_of(timeline(), STEPS, WAYS, job_id="j1", name="grpo")
    kind, body = encoded(request)
    assert kind == "application/x-protobuf"
    assert spans_in(kind, body) == plain_spans(request)


# -- where it goes ----------------------------------------------------------------------------------


def test_a_collector_gets_every_span_in_bounded_requests(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_export, "SPANS_TOGETHER", 5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b, other=c,nothing")
    request = otlp_of(timeline(), STEPS[:2], WAYS, job_id="j1")
    spans = plain_spans(request)
    assert send(request, collector.address) == len(spans)
    assert collector.spans == spans
    assert len(collector.paths) == -(-len(spans) // 5)
    assert set(collector.paths) == {"/v1/traces"}
    assert {(one["api-key"], one["other"]) for one in collector.headers} == {("a b", "c")}


def test_an_address_with_a_path_is_taken_as_it_is(collector: Collector) -> None:
    send(otlp_of(timeline(), STEPS, job_id="j1"), f"{collector.address}/otlp/v1/traces")
    assert set(collector.paths) == {"/otlp/v1/traces"}


def test_without_the_extra_it_goes_as_json(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_export, "installed", lambda module: False)
    request = otlp_of(timeline(), STEPS, job_id="j1")
    send(request, collector.address)
    assert {one["Content-Type"] for one in collector.headers} == {"application/json"}
    assert collector.spans == plain_spans(request)
    collector.answer = (415, "text/plain", b"only protobuf")
    with pytest.raises(Unreachable, match=r"answers 415: only protobuf.*gyre-rl\[otel\]"):
        send(request, collector.address)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((503, "text/plain", b"busy\nnow"), r"The collector 127\.0\.0\.1 answers 503: busy now\."),
        ((400, "text/plain", b"x" * 100_000), r"answers 400: x{200}\.$"),
        ((307, "text/plain", b""), r"answers 307: nothing more"),
        (
            (
                200,
                "application/json",
                b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}',
            ),
            r"has not taken 2 spans: too old\.",
        ),
    ],
)
def test_what_is_not_taken_is_a_sentence(
    collector: Collector, answer: tuple[int, str, bytes], sentence: str
) -> None:
    collector.answer = answer
    with pytest.raises(Unreachable, match=sentence):
        send(otlp_of(timeline(), STEPS, job_id="j1"), collector.address)


@pytest.mark.parametrize(
    "said", [b"", b"{}", b"OK", b'{"partialSuccess": {}}', b'{"partialSuccess": null}', b"[]"]
)
def test_whatever_else_an_answer_200_says_the_spans_are_taken(collector: Collector, said: bytes) -> None:
    collector.answer = (200, "application/json", said)
    send(otlp_of(timeline(), STEPS, job_id="j1"), collector.address)


@pytest.mark.skipif(not HAS_PROTO, reason="the extra otel is not installed")
def test_a_collector_that_refuses_some_says_so_in_protobuf_too(collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = 3
    response.partial_success.error_message = "too old"
    collector.answer = (200, "application/x-protobuf", response.SerializeToString())
    with pytest.raises(Unreachable, match=r"has not taken 3 spans: too old\."):
        send(otlp_of(timeline(), STEPS, job_id="j1"), collector.address)


# -- the sink ---------------------------------------------------------------------------------------


class Standing:
    """A clock that stands still, whoever sleeps."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_the_sink_tells_a_step_when_all_of_it_is_known_as_the_verb_does(
    collector: Collector, tmp_path: Path
) -> None:
    clock = Standing(at(20.0) + 2.0)
    job = SinkJob("j1", "grpo", {}, tmp_path, collector.address, timeline=lambda since, until: timeline())
    sink = OtlpSink(job, clock=clock)
    for step in STEPS[:2]:
        sink.step(step["step"], step["at"], {"seconds": step["seconds"], "reward_mean": step["reward_mean"]})
    sink.flush()
    assert clock.slept == [SETTLES_IN_S - 2.0]
    expected = plain_spans(otlp_of(timeline(), STEPS[:2], job_id="j1", name="grpo"))
    assert [span["id"] for span in collector.spans] == [span["id"] for span in expected]
    sink.flush()
    assert len(collector.spans) == len(expected), "each once"


def test_a_step_that_was_refused_is_told_again(collector: Collector, tmp_path: Path) -> None:
    sink = OtlpSink(SinkJob("j1", "grpo", {}, tmp_path, collector.address), clock=Standing(at(20.0)))
    sink.step(1, at(10.0), {"seconds": 10.0})
    collector.answer = (503, "", b"")
    with pytest.raises(Unreachable):
        sink.flush()


def test_a_sink_without_a_collector_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    with pytest.raises(ConfigError, match="The sink otlp has no collector"):
        OtlpSink(SinkJob("j1", "grpo", {}, tmp_path))
    with pytest.raises(ConfigError, match="'collector:4318' is no address of a collector"):
        parse_job({"observe": {"sinks": [{"kind": "otlp", "to": "collector:4318"}]}, "roles": {}})


def test_a_process_of_the_sink_sends_what_the_store_has(
    job: str, home: Home, collector: Collector, tmp_path: Path
) -> None:
    with open_store(home.database_url()) as store:
        store.update_job("j1", phase="succeeded", ended_at=SINCE + 30.0)
    settings = SinkSettings(
        home.database_url(), "j1", 0, "otlp", str(tmp_path / "s"), os.getpid(), collector.address
    )
    process.run(settings)
    assert [span["name"] for span in collector.spans] == ["step 1", "step 2"]
    assert read_cursor(settings.cursor_path).step == 2


# -- the verb ---------------------------------------------------------------------------------------


def test_the_verb_writes_a_file_or_sends(job: str, tmp_path: Path, collector: Collector, home: Home) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["trace", job, *arguments])

    file = tmp_path / "trace.json"
    result = run("--step", "2", "--otlp", str(file))
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    written = plain_spans(json.loads(file.read_text()))
    assert [span["name"] for span in written] == ["step 2"], "the steps before it are not asked for"
    result = run("--otlp", collector.address)
    assert result.exit_code == 0, result.output
    assert "2 spans of 2 steps sent." in result.stderr
    assert [span["name"] for span in collector.spans] == ["step 1", "step 2"]
    assert collector.spans[1] == written[0], "told twice, there once"
    for to, code, sentence in (
        (str(tmp_path / "no" / "file"), 2, "cannot be written (No such file or directory)"),
        ("ftp://x", 2, "ftp://x is no address"),
        ("http://127.0.0.1:1", 3, "The collector 127.0.0.1 cannot be reached"),
    ):
        result = run("--otlp", to)
        assert result.exit_code == code, result.output
        assert sentence in result.stderr


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no address"):
        send(otlp_of(timeline(), STEPS, job_id="j1"), "http://")
