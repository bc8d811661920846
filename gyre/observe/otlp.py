"""A job's steps as traces of OpenTelemetry, in OTLP's JSON form.

Each step is a trace of its own. Its root span is the step, with its metrics; the spans below it are what each vertex
and each instance did meanwhile, and the ways of its samples; incidents, publishes and the like are events of the root.

Invariants:
- *sent twice, there once*: trace and spans have ids that follow from the job, the step and what they are, so who
  gets a step again finds the same spans;
- *as the protocol has it*: ids are lower-case hex, times are nanoseconds since 1970 as text, a child lies within its
  step;
- *nothing invented*: as in `gyre.observe.trace`, whose spans these are.

Pure. This module must not know where its data come from, or go to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gyre.observe.chapters import Flag
from gyre.observe.timeline import Timeline
from gyre.observe.trace import SampleWay, begin_of, parts_of
from gyre.version import __version__

INTERNAL = 1
"""The kind of a span that no other process asked for."""

NANOSECONDS = 10**9

OtlpSpan = dict[str, Any]


def otlp_of(
    timeline: Timeline,
    steps: Sequence[Mapping[str, Any]],
    ways: Sequence[SampleWay] = (),
    *,
    job_id: str,
    name: str = "job",
) -> dict[str, Any]:
    """The steps as an `ExportTraceServiceRequest`, as JSON-able data. `steps` are as in `trace_of`; those without a
    time cannot be placed, and are left out."""
    spans: list[OtlpSpan] = []
    for step in steps:
        if is_placed(step):
            mine = [way for way in ways if way.step == step["step"]]
            spans += _StepTrace(job_id, step).spans(timeline, mine)
    return request_of(spans, job_id=job_id, name=name)


def request_of(spans: Sequence[OtlpSpan], *, job_id: str, name: str) -> dict[str, Any]:
    resource = {
        "service.name": "gyre",
        "service.instance.id": job_id,
        "gyre.job": name,
        "gyre.job_id": job_id,
    }
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": {"name": "gyre", "version": __version__}, "spans": list(spans)}],
            }
        ]
    }


def is_placed(step: Mapping[str, Any]) -> bool:
    """Whether it is known when the step was."""
    at = step.get("at")
    return isinstance(at, int | float) and math.isfinite(at) and at > 0


def trace_id(job_id: str, step: int) -> str:
    return hashlib.sha256(f"{job_id}/{step}".encode()).hexdigest()[:32]


class _StepTrace:
    def __init__(self, job_id: str, step: Mapping[str, Any]) -> None:
        self._job_id, self._step = job_id, step
        self._trace_id = trace_id(job_id, step["step"])
        self._begin, self._end = begin_of(step), float(step["at"])
        self._root = self._id("step")

    def spans(self, timeline: Timeline, ways: Sequence[SampleWay]) -> list[OtlpSpan]:
        root = self._span(self._root, "", f"step {self._step['step']}", self._begin, self._end, self._step)
        root["events"] = [_event(flag) for flag in timeline.flags if self._begin <= flag.at <= self._end]
        return [root, *self._lanes(timeline), *(span for way in ways for span in self._way(way))]

    def _lanes(self, timeline: Timeline) -> Iterator[OtlpSpan]:
        for lane in timeline.lanes:
            seen = 0
            for span in lane.spans:
                begin, end = max(span.begin, self._begin), min(span.end, self._end)
                if begin >= end:
                    continue
                seen += 1
                role = lane.role or "instances"
                about = {"gyre.role": role, f"gyre.{lane.kind}": lane.id, "gyre.state": span.state}
                if span.cause:
                    about["gyre.cause"] = span.cause
                yield self._span(
                    self._id("lane", lane.id, seen),
                    self._root,
                    f"{role} {span.state}",
                    begin,
                    end,
                    about,
                )

    def _way(self, way: SampleWay) -> Iterator[OtlpSpan]:
        named = f"sample {way.group}/{way.sample}"
        parts = parts_of(way, self._step)
        if not parts:
            return
        sample = self._id("sample", way.group, way.sample)
        about = {"gyre.group": way.group, "gyre.sample": way.sample, "gyre.reward": way.reward}
        yield self._span(sample, self._root, named, parts[0].begin, parts[-1].end, about)
        for at, part in enumerate(parts):
            yield self._span(
                self._id("sample", way.group, way.sample, at),
                sample,
                f"{part.instance} generates tokens {part.first} to {part.last}",
                part.begin,
                part.end,
                {
                    "gyre.instance": part.instance,
                    "gyre.tokens": part.last - part.first,
                    "gyre.versions": ",".join(map(str, part.versions)),
                    "gyre.placed": "by its tokens, over the time of its step",
                },
            )

    def _id(self, *what: object) -> str:
        named = "/".join(map(str, (self._job_id, self._step["step"], *what)))
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    def _span(
        self, span_id: str, parent: str, name: str, begin: float, end: float, about: Mapping[str, Any]
    ) -> OtlpSpan:
        span: OtlpSpan = {
            "traceId": self._trace_id,
            "spanId": span_id,
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": _nanoseconds(begin),
            "endTimeUnixNano": _nanoseconds(max(begin, end)),
            "attributes": _attributes(about),
        }
        if parent:
            span["parentSpanId"] = parent
        return span


def _event(flag: Flag) -> dict[str, Any]:
    about = {"text": flag.text, "gyre.event": flag.seq}
    return {"timeUnixNano": _nanoseconds(flag.at), "name": flag.kind, "attributes": _attributes(about)}


def _nanoseconds(at: float) -> str:
    return str(round(max(0.0, at) * NANOSECONDS))


def _attributes(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plain values: texts, numbers and switches. What is not there, or is not finite, is no attribute."""
    found = []
    for key, value in about.items():
        if isinstance(value, bool):
            told: dict[str, Any] = {"boolValue": value}
        elif isinstance(value, int):
            told = {"intValue": str(value)}
        elif isinstance(value, float) and math.isfinite(value):
            told = {"doubleValue": value}
        elif isinstance(value, str):
            told = {"stringValue": value}
        else:
            continue
        found.append({"key": key, "value": told})
    return found
