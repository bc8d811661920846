"""Sending spans to a collector of OpenTelemetry over HTTP.

They go as protobuf where the extra `[otel]` is installed, and as JSON where it is not: collectors take both, some
services only the first.

Invariants:
- *taken, or an error*: a span that the collector refuses is told, as a sentence without headers;
- *bounded*: so many spans in a request, and every wait has an end.

This module must not know what a span says.
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from gyre.config.secrets import is_address
from gyre.errors import ConfigError, Unreachable
from gyre.extras import how_to_install, installed, needed
from gyre.observe.http_deadline import bounded, within

PROTO = "opentelemetry.proto"
SPANS_TOGETHER = 2000
ANSWER_WITHIN_S = 20.0
"""For each request and its answer, as a whole."""
SHOWN_CHARS = 200
_ANSWER_BYTES = 65_536
_SERVICE = f"{PROTO}.collector.trace.v1.trace_service_pb2"
_TRACES = "/v1/traces"


def is_collector(to: str) -> bool:
    """Whether this is an address, and not the name of a file."""
    return "://" in to


def send(request: Mapping[str, Any], to: str, *, headers: Mapping[str, str] | None = None) -> int:
    """Send an `ExportTraceServiceRequest` to the collector at this address: its base, to which `/v1/traces` is added,
    or the whole. Headers are those given and those of OTEL_EXPORTER_OTLP_HEADERS. Returns how many spans were sent.
    Raises ConfigError for what is no address, Unreachable where they were not taken."""
    address = _address_of(to)
    common = {
        "User-Agent": "gyre",
        "Accept-Encoding": "identity",
        **headers_of_environment(),
        **(headers or {}),
    }
    sent = 0
    with bounded(httpx.Client(timeout=ANSWER_WITHIN_S, follow_redirects=False)) as client:
        for part, spans in _parts_of(request):
            kind, body = encoded(part)
            _post(client, address, {**common, "Content-Type": kind}, body)
            sent += spans
    return sent


def encoded(request: Mapping[str, Any]) -> tuple[str, bytes]:
    """The request as bytes, and their content type."""
    if not installed(PROTO):
        return "application/json", json.dumps(request, allow_nan=False).encode()
    return "application/x-protobuf", as_protobuf(request)


def as_protobuf(request: Mapping[str, Any]) -> bytes:
    told = copy.deepcopy(dict(request))
    for span in _spans_of(told):
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:  # OTLP's JSON has hex where protobuf's own has base64
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    parse = needed("google.protobuf.json_format", "OTLP as protobuf").ParseDict
    body: bytes = parse(
        told, needed(_SERVICE, "OTLP as protobuf").ExportTraceServiceRequest()
    ).SerializeToString()
    return body


def headers_of_environment() -> dict[str, str]:
    """OTEL_EXPORTER_OTLP_HEADERS, as OpenTelemetry has it: `name=value,name=value`, escaped as in addresses."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}


def _address_of(to: str) -> str:
    if not is_address(to):
        raise ConfigError(f"{to} is no address.", hint='Expected "http://collector:4318".')
    parts = urlsplit(to)
    return urlunsplit(parts._replace(path=_TRACES)) if parts.path in ("", "/") else to


def _spans_of(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


def _parts_of(request: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """The request in requests of at most so many spans, and how many each has."""
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            spans = scope["spans"]
            for begin in range(0, len(spans), SPANS_TOGETHER):
                some = spans[begin : begin + SPANS_TOGETHER]
                part = {**resource, "scopeSpans": [{**scope, "spans": some}]}
                yield {"resourceSpans": [part]}, len(some)


def _post(client: httpx.Client, address: str, headers: Mapping[str, str], body: bytes) -> None:
    where = f"The collector {urlsplit(address).hostname}"
    try:
        with (
            within(ANSWER_WITHIN_S),
            client.stream("POST", address, content=body, headers=headers) as answer,
        ):
            said = _beginning_of(answer)
    except httpx.TimeoutException:
        raise Unreachable(f"{where} does not answer within {ANSWER_WITHIN_S:g} s.") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise Unreachable(f"{where} cannot be reached: {type(error).__name__}.") from None
    if not answer.is_success:
        wants = answer.status_code == 415 and headers["Content-Type"] == "application/json"
        raise Unreachable(
            f"{where} answers {answer.status_code}: {_text(said)}.",
            hint=f"It may want protobuf: {how_to_install(PROTO)}." if wants else "",
        )
    rejected, why = _rejected(answer.headers.get("content-type", ""), said)
    if rejected:
        raise Unreachable(
            f"{where} has not taken {rejected} spans: {why[:SHOWN_CHARS] or 'it does not say why'}."
        )


def _beginning_of(answer: httpx.Response) -> bytes:
    """What an answer that is short says; of a longer one the beginning."""
    said = b""
    for part in answer.iter_raw():
        said += part
        if len(said) > _ANSWER_BYTES:
            break
    return said[:_ANSWER_BYTES]


def _text(said: bytes) -> str:
    return " ".join(said.decode("utf-8", "replace").split())[:SHOWN_CHARS] or "nothing more"


def _rejected(kind: str, said: bytes) -> tuple[int, str]:
    """How many spans were refused, and why, as an `ExportTraceServiceResponse` says; an answer that is none says
    nothing."""
    try:
        if kind.startswith("application/x-protobuf") and installed(PROTO):
            found = (
                needed(_SERVICE, "OTLP as protobuf")
                .ExportTraceServiceResponse.FromString(said)
                .partial_success
            )
            return int(found.rejected_spans), str(found.error_message)
        told = json.loads(said or b"{}").get("partialSuccess") or {}
        return int(told.get("rejectedSpans", 0)), str(told.get("errorMessage", ""))
    except Exception:  # a collector's words, of whatever form: the spans were accepted all the same
        return 0, ""
