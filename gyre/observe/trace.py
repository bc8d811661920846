"""A job's way as a Chrome trace, which Perfetto and chrome://tracing open.

Roles are processes and their vertices threads, with the spans of the time line; the optimizer's steps are a process of
their own, with the metrics of each as its arguments. Arrows lead from the generation of a step's samples to the step.
Incidents, publishes, evaluations, checkpoints and commands are instant events. A sample's way is a thread of its own:
the instances that generated it, one after the other, as shares of its tokens.

Invariants:
- *as the format has it*: every event has `ph`, `pid`, `tid` and `ts` in microseconds since the first event; an arrow
  begins and ends within spans, with one id; metadata name every process and thread;
- *nothing invented*: an arrow begins in a span in which that instance generated, and a sample's parts are placed by its
  tokens, whose own times nobody keeps; their arguments say so.

Pure. This module must not know where its data come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gyre.observe.chapters import INCIDENT
from gyre.observe.timeline import GENERATE, Span, Timeline

STEPS_PROCESS = 1
FLAGS_PROCESS = 2
SAMPLES_PROCESS = 3
FIRST_ROLE = 10
MICROSECONDS = 1e6

_COLORS = {
    "train": "good",
    "generate": "thread_state_running",
    "wait": "thread_state_sleeping",
    "load": "thread_state_iowait",
    "reward": "thread_state_runnable",
    "checkpoint": "yellow",
    "evaluate": "olive",
    "start": "startup",
    "down": "terrible",
    "idle": "grey",
}
"""Names of the viewers' own palette."""

Event = dict[str, Any]


class SampleWay(NamedTuple):
    """A sample of a step, and which of its tokens which instance generated: (name, start, end)."""

    step: int
    group: int
    sample: int
    instances: Sequence[tuple[str, int, int]]
    versions: Sequence[tuple[int, int, int]] = ()
    reward: float | None = None


def trace_of(
    timeline: Timeline,
    steps: Sequence[Mapping[str, Any]],
    ways: Sequence[SampleWay] = (),
    *,
    name: str = "job",
) -> dict[str, Any]:
    """The trace as JSON-able data. `steps` are the metrics of optimizer steps, with `step`, `at` (when it ended, in
    seconds since 1970) and `seconds`; those that end within the time line are told."""
    trace = _Trace(timeline, name)
    trace.add_lanes()
    told = [step for step in steps if _is_within(step, timeline)]
    trace.add_steps(told)
    trace.add_flags()
    for step in told:
        mine = [way for way in ways if way.step == step["step"]]
        trace.add_arrows(step, {instance for way in mine for instance, _, _ in way.instances})
        for way in mine:
            trace.add_sample(way, step)
    return {
        "traceEvents": [*trace.metadata, *sorted(trace.events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": {"job": name, "since": timeline.since, "until": timeline.until},
    }


class WayPart(NamedTuple):
    """The tokens `first` to `last` of a sample, which one instance generated, placed over the time of its step."""

    instance: str
    first: int
    last: int
    begin: float
    end: float
    versions: tuple[int, ...]


def parts_of(way: SampleWay, step: Mapping[str, Any]) -> list[WayPart]:
    """A sample's parts, each as wide as it has tokens: nobody keeps when a token was generated."""
    tokens = max((end for _, _, end in way.instances), default=0)
    if not tokens:
        return []
    begin = begin_of(step)
    width = (float(step["at"]) - begin) / tokens
    return [
        WayPart(
            name,
            first,
            last,
            begin + first * width,
            begin + last * width,
            tuple(version for version, since, until in way.versions if since < last and until > first),
        )
        for name, first, last in way.instances
    ]


def _is_within(step: Mapping[str, Any], timeline: Timeline) -> bool:
    at = step.get("at")
    return isinstance(at, int | float) and timeline.since <= at <= timeline.until + 1.0


def begin_of(step: Mapping[str, Any]) -> float:
    """When the step began, in seconds since 1970."""
    seconds = step.get("seconds")
    return float(step["at"]) - (float(seconds) if isinstance(seconds, int | float) else 0.0)


class _Trace:
    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self.metadata: list[Event] = []
        self.events: list[Event] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._arrows = 0
        self._named: set[tuple[int, int]] = set()
        self._name_process(STEPS_PROCESS, f"{name}: steps")
        self._name_thread(STEPS_PROCESS, 1, "optimizer")

    # -- what there is ------------------------------------------------------------------------------

    def add_lanes(self) -> None:
        roles: dict[str, int] = {}
        for lane in self._timeline.lanes:
            role = lane.role or "instances"
            if role not in roles:
                roles[role] = FIRST_ROLE + len(roles)
                self._name_process(roles[role], role)
            pid = roles[role]
            tid = 1 + sum(place[0] == pid for place in self._places.values())
            self._places[lane.id] = (pid, tid)
            self._name_thread(pid, tid, lane.id)
            for span in lane.spans:
                self._complete(
                    pid,
                    tid,
                    span.begin,
                    span.end,
                    f"{span.state}: {span.cause}" if span.cause else span.state,
                    span.state,
                    {"cause": span.cause} if span.cause else {},
                    color=_COLORS.get(span.state),
                )

    def add_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        before = self._timeline.since
        for step in steps:
            numbers = {
                key: value for key, value in step.items() if isinstance(value, int | float | str | bool)
            }
            begin = max(begin_of(step), before)  # spans of a thread must not overlap
            before = float(step["at"])
            self._complete(STEPS_PROCESS, 1, begin, before, f"step {step['step']}", "step", numbers)

    def add_flags(self) -> None:
        kinds: dict[str, int] = {}
        for flag in self._timeline.flags:
            if not kinds:
                self._name_process(FLAGS_PROCESS, "events")
            if flag.kind not in kinds:
                kinds[flag.kind] = len(kinds) + 1
                self._name_thread(FLAGS_PROCESS, kinds[flag.kind], f"{flag.kind}s")
            self.events.append(
                {
                    "ph": "i",
                    # An incident is seen across all processes.
                    "s": "g" if flag.kind == INCIDENT else "p",
                    "pid": FLAGS_PROCESS,
                    "tid": kinds[flag.kind],
                    "ts": self._ts(flag.at),
                    "name": f"{flag.kind}: {flag.text}",
                    "cat": flag.kind,
                    "args": {"event": flag.seq, "text": flag.text},
                }
            )

    def add_arrows(self, step: Mapping[str, Any], instances: set[str]) -> None:
        """From the last generation before the step's end to the step, of each instance that is known to have generated
        samples of it; where none is known, of each that generated."""
        for lane in self._timeline.lanes:
            if instances and lane.id not in instances:
                continue
            span = _last_generation(lane.spans, float(step["at"]))
            if span is None:
                continue
            begin, end = max(span.begin, begin_of(step)), min(span.end, float(step["at"]))
            leaves_at = (begin + end) / 2 if begin < end else (span.begin + span.end) / 2
            arrives_at = (max(begin_of(step), leaves_at) + float(step["at"])) / 2
            self._arrow(self._places[lane.id], leaves_at, (STEPS_PROCESS, 1), arrives_at)

    def add_sample(self, way: SampleWay, step: Mapping[str, Any]) -> None:
        """Its parts between the first generation that can be of it and the end of its step."""
        parts = parts_of(way, step)
        if not parts:
            return
        self._name_process(SAMPLES_PROCESS, "samples (placed by tokens)")
        tid = 1 + sum(pid == SAMPLES_PROCESS for pid, _ in self._named)
        self._name_thread(SAMPLES_PROCESS, tid, f"step {way.step}, group {way.group}, sample {way.sample}")
        for part in parts:
            self._complete(
                SAMPLES_PROCESS,
                tid,
                part.begin,
                part.end,
                f"{part.instance}: tokens {part.first} to {part.last}",
                "sample",
                {
                    "instance": part.instance,
                    "tokens": part.last - part.first,
                    "versions": list(part.versions),
                    "reward": way.reward,
                    "placed": "by its tokens, over the time of its step",
                },
            )

    # -- events -------------------------------------------------------------------------------------

    def _ts(self, at: float) -> float:
        return round((at - self._timeline.since) * MICROSECONDS, 3)

    def _complete(
        self,
        pid: int,
        tid: int,
        begin: float,
        end: float,
        name: str,
        category: str,
        args: Mapping[str, Any],
        *,
        color: str | None = None,
    ) -> None:
        event: Event = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": self._ts(begin),
            "dur": max(0.0, round((end - begin) * MICROSECONDS, 3)),
            "name": name,
            "cat": category,
            "args": dict(args),
        }
        if color is not None:
            event["cname"] = color
        self.events.append(event)

    def _arrow(
        self, source: tuple[int, int], leaves_at: float, target: tuple[int, int], arrives_at: float
    ) -> None:
        self._arrows += 1
        common = {"name": "samples", "cat": "samples", "id": self._arrows}
        self.events.append(
            {**common, "ph": "s", "pid": source[0], "tid": source[1], "ts": self._ts(leaves_at)}
        )
        self.events.append(
            {**common, "ph": "f", "bp": "e", "pid": target[0], "tid": target[1], "ts": self._ts(arrives_at)}
        )

    def _name_process(self, pid: int, name: str) -> None:
        if any(known == pid for known, _ in self._named):
            return
        for key, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
            self.metadata.append({"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": key, "args": args})

    def _name_thread(self, pid: int, tid: int, name: str) -> None:
        self._named.add((pid, tid))
        for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": tid})):
            self.metadata.append({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": key, "args": args})


def _last_generation(spans: Sequence[Span], until: float) -> Span | None:
    found = [span for span in spans if span.state == GENERATE and span.begin < until]
    return found[-1] if found else None
