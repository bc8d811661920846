"""Lanes: what each vertex did from when to when, from the journal's moves and the numbers' ticks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.observe.chapters import Flag, PhaseChange
from gyre.observe.series import Series
from gyre.observe.timeline import (
    DOWN,
    GENERATE,
    IDLE,
    LOAD,
    MOST_FLAGS,
    MOST_SPANS,
    START,
    TRAIN,
    WAIT,
    Activities,
    Lane,
    Span,
    bounded,
    bounded_flags,
    instance_ticks,
    joined,
    role_ticks,
    spans_of,
    state_of,
)
from gyre.workloads.trainer.rollout_requests import UNDERWAY_WORDS
from tests.examples import examples

ROLLOUT = "rollout (generating)"


def moves(*told: tuple[float, str, str]) -> list[PhaseChange]:
    return [PhaseChange(at, "actor-0", "actor", phase, why) for at, phase, why in told]


@pytest.mark.parametrize(
    ("activity", "state"),
    [
        ("training", (TRAIN, "")),
        ("stepping the optimizer", (TRAIN, "stepping the optimizer")),
        ("generating", (GENERATE, "")),
        ("publishing", (LOAD, "publishing")),
        ("waits for rollout (generating)", (WAIT, ROLLOUT)),
        ("nothing to do", (IDLE, "")),
        ("loading weights", (LOAD, "")),
        ("delivering", (WAIT, "delivering")),
        ("starting an engine", (START, "starting an engine")),
        ("my_own_method", (TRAIN, "my_own_method")),
    ],
)
def test_an_activity_of_the_trainer_has_a_state_and_a_cause(activity: str, state: tuple[str, str]) -> None:
    assert state_of(activity) == state


def test_what_a_role_did_in_a_tick_is_what_its_seconds_grew_by() -> None:
    numbers = {
        "spent_s/actor/training": [(5.0, 2.0), (10.0, 6.0), (15.0, 1.0)],
        "spent_s/actor/waits for rollout (generating)": [(5.0, 3.0), (10.0, 4.0), (15.0, 1.0)],
        "reward": [(5.0, 0.5)],
    }
    first, second, third = role_ticks(numbers, 5.0)["actor"]
    assert first == (0.0, 5.0, {(TRAIN, ""): 0.4, (WAIT, ROLLOUT): 0.6})
    assert second == (5.0, 10.0, {(TRAIN, ""): 0.8, (WAIT, ROLLOUT): 0.2})
    assert third == (10.0, 15.0, {(TRAIN, ""): 0.5, (WAIT, ROLLOUT): 0.5}), "another trainer began to count"


@pytest.mark.parametrize("instances", [1, 2])
def test_an_only_instance_did_what_its_role_counted_and_not_what_a_look_saw(instances: int) -> None:
    """Two looks found it loading weights, which took 0.45 s of ten."""
    trainer = {
        "spent_s/rollout/generating": [(5.0, 3.0), (10.0, 6.0)],
        "spent_s/rollout/loading weights": [(5.0, 0.25), (10.0, 0.45)],
        "spent_s/rollout/waits for actor (training)": [(5.0, 1.75), (10.0, 3.55)],
    }
    looks = {f"instance/rollout-{n}": {"state/loading": [(0.0, 1.0), (5.0, 1.0)]} for n in range(instances)}
    read = {"trainer": {"trainer": trainer}, "instance": looks, "vertex": {}}
    ticks = Activities(lambda prefix: Series(5.0, read[prefix]), instances).of("rollout-0", "rollout")
    found = spans_of([PhaseChange(0.0, "rollout-0", "rollout", "running", "")], ticks, 0.0, 10.0)
    seconds = dict.fromkeys((GENERATE, LOAD, WAIT), 0.0)
    for span in found:
        seconds[span.state] += span.end - span.begin
    expected = [6.0, 0.45, 3.55] if instances == 1 else [0.0, 10.0, 0.0]
    assert list(seconds.values()) == pytest.approx(expected)


def test_all_that_a_rollout_plane_does_has_a_state() -> None:
    for what in UNDERWAY_WORDS.values():
        assert state_of(what)[0] in (GENERATE, LOAD, START, WAIT)


def test_a_vertex_that_died_is_down_until_it_runs_again_and_says_why() -> None:
    ticks = [(at, at + 5.0, {(TRAIN, ""): 1.0}) for at in range(0, 40, 5)]
    told = moves(
        (0.0, "starting", "submitted"),
        (4.0, "running", ""),
        (17.0, "starting", "process_died"),
        (23.0, "running", ""),
        (38.0, "stopped", "finished"),
    )
    assert spans_of(told, ticks, 0.0, 40.0) == [
        Span(0.0, 4.0, START, ""),
        Span(4.0, 17.0, TRAIN, ""),
        Span(17.0, 23.0, DOWN, "process_died"),
        Span(23.0, 38.0, TRAIN, ""),
    ]


def test_shares_of_a_tick_lie_side_by_side_and_equal_ones_of_two_ticks_are_one_span() -> None:
    halves = {(TRAIN, ""): 0.5, (WAIT, ROLLOUT): 0.5}
    found = spans_of(moves((0.0, "running", "")), [(0.0, 5.0, halves), (5.0, 10.0, halves)], 0.0, 10.0)
    assert found == [
        Span(0.0, 2.5, TRAIN, ""),
        Span(2.5, 7.5, WAIT, ROLLOUT),
        Span(7.5, 10.0, TRAIN, ""),
    ]


def test_an_instance_generates_loads_and_idles() -> None:
    numbers = {
        "state/working": [(0.0, 1.0), (5.0, 0.0), (10.0, 0.0)],
        "state/loading": [(0.0, 0.0), (5.0, 1.0), (10.0, 0.0)],
        "state/asleep": [(0.0, 0.0), (5.0, 0.0), (10.0, 1.0)],
    }
    found = spans_of(moves((0.0, "running", "")), instance_ticks(numbers, 5.0), 0.0, 15.0)
    assert [(span.state, span.cause) for span in found] == [(GENERATE, ""), (LOAD, ""), (IDLE, "asleep")]


_SHARES = st.dictionaries(
    st.sampled_from([(TRAIN, ""), (WAIT, ROLLOUT), (LOAD, "publishing"), (IDLE, "")]),
    st.floats(0.0, 1.0),
    max_size=4,
)


@given(
    begins=st.lists(st.integers(0, 100), min_size=1, max_size=8, unique=True).map(sorted),
    phases=st.lists(st.sampled_from(["starting", "running", "stopping", "stopped"]), min_size=8, max_size=8),
    shares=st.lists(_SHARES, max_size=20),
    since=st.floats(0, 50),
)
@settings(max_examples=examples(200), deadline=None)
def test_whole_and_joined_whatever_happens(
    begins: list[int], phases: list[str], shares: list[dict[tuple[str, str], float]], since: float
) -> None:
    told = moves(*((float(at), phase, "") for at, phase in zip(begins, phases, strict=False)))
    ticks = [(at * 5.0, at * 5.0 + 5.0, one) for at, one in enumerate(shares)]
    spans = spans_of(told, ticks, since, 120.0)
    for span, after in pairwise(spans):
        assert span.end <= after.begin
        assert span.end < after.begin or span[2:] != after[2:], "joined"
    there = sum(
        max(0.0, min(end, 120.0) - max(float(at), since))
        for at, end, phase in zip(begins, [*begins[1:], 120.0], phases, strict=False)
        if phase != "stopped"
    )
    assert math.isclose(sum(span.end - span.begin for span in spans), there, abs_tol=1e-6)


def test_an_answer_is_bounded_and_being_down_is_never_left_out() -> None:
    alternating = [Span(at, at + 1.0, (TRAIN, WAIT)[at % 2], "") for at in range(20_000)]
    alternating[777] = Span(777.0, 778.0, DOWN, "process_died")
    lanes = bounded([Lane("actor-0", "actor", "vertex", alternating)] * 3, 0.0, 20_000.0)
    assert sum(len(lane.spans) for lane in lanes) <= MOST_SPANS
    for lane in lanes:
        assert lane.spans == joined(lane.spans)
        assert (lane.spans[0].begin, lane.spans[-1].end) == (0.0, 20_000.0)
        assert any(span.state == DOWN and span.begin <= 777.0 < span.end for span in lane.spans)
    few = [Lane("actor-0", "actor", "vertex", alternating[:100])]
    assert bounded(few, 0.0, 20_000.0) == few, "what is few is told to the second"


def test_of_too_many_flags_some_of_each_kind_are_told() -> None:
    many = [
        Flag(float(seq), kind, "", seq)
        for seq, kind in enumerate(["publish"] * 50_000 + ["incident"] * 3 + ["checkpoint"] * 5000)
    ]
    told = bounded_flags(many)
    assert len(told) <= MOST_FLAGS
    assert [flag.kind for flag in told].count("incident") == 3
    assert told == sorted(told)
