"""A trace is as the format has it, and says nothing that nobody knows."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from gyre.observe.chapters import Flag
from gyre.observe.timeline import Lane, Span, Timeline, timeline_from
from gyre.observe.trace import SampleWay, trace_of

SINCE = 1_700_000_000.0


def at(seconds: float) -> float:
    return SINCE + seconds


def timeline() -> Timeline:
    def spans(*told: tuple[float, float, str, str]) -> list[Span]:
        return [Span(at(begin), at(end), state, cause) for begin, end, state, cause in told]

    return Timeline(
        SINCE,
        at(30.0),
        SINCE,
        at(30.0),
        [
            Lane("trainer-0", "trainer", "vertex", spans((0, 30, "train", ""))),
            Lane(
                "actor-0",
                "actor",
                "vertex",
                spans((0, 8, "wait", "rollout (generating)"), (8, 10, "train", "")),
            ),
            Lane("rollout-0", "rollout", "instance", spans((0, 9, "generate", ""), (12, 19, "generate", ""))),
            Lane(
                "rollout-1",
                "rollout",
                "instance",
                spans((0, 4, "generate", ""), (4, 9, "down", "process_died")),
            ),
            Lane("guest", "", "instance", spans((2, 3, "load", ""))),
        ],
        [
            Flag(at(4.0), "incident", "rollout-1: process_died; restart", 12),
            Flag(at(10.0), "publish", "version 1 of step 1", 15),
        ],
        False,
    )


STEPS = [
    {"step": 1, "at": at(10.0), "seconds": 10.0, "reward_mean": 0.25, "kl": None},
    {"step": 2, "at": at(20.0), "seconds": 10.5, "reward_mean": 0.5},
    {"step": 3, "at": at(99.0), "seconds": 10.0},
]
WAYS = [SampleWay(1, 7, 0, [("rollout-1", 0, 6), ("rollout-0", 6, 8)], [(0, 0, 8)], reward=1.0)]


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What the format asks for (Trace Event Format): raises AssertionError where something is not so."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events: list[dict[str, Any]] = trace["traceEvents"]
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "i", "s", "f")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert isinstance(event["name"], str)
        place = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert place not in named[event["name"]], "named once"
            named[event["name"]].add(place)
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            threads[place].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            arrows[event["id"]].append(event)
    for place, spans in threads.items():
        assert place in named["thread_name"]
        assert (place[0], 0) in named["process_name"]
        for before, after in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert before[1] <= after[0] + 0.001, "spans of a thread do not overlap"
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"]
        for arrow in (begin, end):
            spans = threads[arrow["pid"], arrow["tid"]]
            assert any(first <= arrow["ts"] <= last for first, last in spans), "an arrow is bound to a span"
    return events


def test_a_trace_is_as_the_format_has_it() -> None:
    events = check(trace_of(timeline(), STEPS, WAYS, name="grpo"))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes.values()) == {
        "grpo: steps",
        "events",
        "samples (placed by tokens)",
        "trainer",
        "actor",
        "rollout",
        "instances",
    }
    (incident,) = [e for e in events if e["ph"] == "i" and e["cat"] == "incident"]
    assert (incident["ts"], incident["s"], incident["args"]["event"]) == (4e6, "g", 12)
    assert {e["name"] for e in events if e["ph"] == "X" and e.get("cat") == "step"} == {"step 1", "step 2"}
    (first,) = [e for e in events if e["name"] == "step 1"]
    assert first["args"] == {"step": 1, "at": at(10.0), "seconds": 10.0, "reward_mean": 0.25}


def test_arrows_lead_from_those_that_generated_a_step_to_it() -> None:
    def sources(ways: list[SampleWay]) -> list[tuple[str, str]]:
        trace = trace_of(timeline(), STEPS, ways)
        events = check(trace)
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        begins = {e["id"]: threads[e["pid"], e["tid"]] for e in events if e["ph"] == "s"}
        steps = [e for e in events if e.get("cat") == "step"]
        ends = {
            e["id"]: next(s["name"] for s in steps if s["ts"] <= e["ts"] <= s["ts"] + s["dur"])
            for e in events
            if e["ph"] == "f"
        }
        return sorted((begins[number], ends[number]) for number in begins)

    nobody_known = sources([])
    assert nobody_known == [
        ("rollout-0", "step 1"),
        ("rollout-0", "step 2"),
        ("rollout-1", "step 1"),
        ("rollout-1", "step 2"),
    ]
    assert ("rollout-1", "step 1") not in sources([SampleWay(1, 7, 0, [("rollout-0", 0, 8)])])


def test_a_samples_way_is_in_the_order_of_its_tokens() -> None:
    events = check(trace_of(timeline(), STEPS, WAYS))
    parts = [e for e in events if e.get("cat") == "sample"]
    assert [(e["args"]["instance"], e["args"]["tokens"], e["dur"]) for e in parts] == [
        ("rollout-1", 6, 7.5e6),
        ("rollout-0", 2, 2.5e6),
    ]
    assert parts[0]["args"]["versions"] == [0]


def test_a_timeline_comes_back_from_json() -> None:
    told = timeline()
    assert timeline_from(json.loads(json.dumps(told.as_dict()))) == told


def test_a_job_without_anything_has_a_trace_too() -> None:
    check(trace_of(Timeline(SINCE, SINCE, SINCE, SINCE, [], [], False), []))
