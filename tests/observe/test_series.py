"""A job's numbers over time: what they are, that they come back, and that they are bounded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import StoreCorrupt
from gyre.failover import JobPhase, JobState, VertexPhase, VertexRecord
from gyre.observe.series import Recorder, numbers_of, read_series, tick_for
from gyre.observe.series.frame import Frame, frame_of, mean_of, pack, unpack
from gyre.observe.series.numbers import MOST_NUMBERS, Numbers, flat
from gyre.observe.series.reading import MOST_VALUES, spent_by_role
from gyre.observe.series.thinning import (
    LONGEST_TICK_S,
    MINUTES,
    QUARTERS,
    TICK_S,
    TICKS,
    forget_before,
    is_meant,
)
from gyre.store import SeriesStore, open_store
from tests.examples import examples

BASE = 1_700_000_100.0
"""The begin of a quarter of an hour."""


def numbers_in(frame: Frame) -> Numbers:
    return {
        source: dict(zip(group.names, row, strict=True))
        for group in frame
        for source, row in zip(group.sources, group.values.tolist(), strict=True)
    }


NUMBERS = st.dictionaries(
    st.sampled_from(["vertex/a-0", "vertex/a-1", "instance/r-0", "trainer", "plane"]),
    st.dictionaries(st.sampled_from(["x", "y", "y_max", "state/working"]), st.floats(-1e9, 1e9), max_size=4),
    max_size=5,
)


@pytest.fixture
def series(tmp_path: Path) -> Iterator[SeriesStore]:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        yield store.series("j1")


def running(vertex: str) -> VertexRecord:
    role, _, rank = vertex.rpartition("-")
    return VertexRecord(vertex, role, int(rank), phase=VertexPhase.RUNNING, restarts=2)


# -- what they are ----------------------------------------------------------------------------------


def test_every_source_has_the_numbers_that_it_reported() -> None:
    names = ("trainer-0", "rollout_manager-0", "rollout-0", "reward-0")
    state = JobState(vertices={name: running(name) for name in names})
    health = {
        "queued": 3,
        "account": {"generated": 100, "discarded": {"stale": 4}},
        "instances": [
            {"instance": "rollout-0", "state": "working", "rate_tokens_s": 12.5, "pid": 7, "node": "n"},
            {"instance": "guest", "state": "loading", "version": 3},
            {"no name": 1},
            "nothing",
        ],
    }
    telemetry: dict[str, dict[str, Any]] = {
        "trainer-0": {
            "version": None,
            "busy": "",
            "fields": {"step": 4, "times": {"actor": {"training": 0.5}}},
        },
        "rollout_manager-0": {"version": None, "busy": "", "fields": {"health": health}},
        "rollout-0": {"version": 3, "busy": "generate", "fields": {"queue": 1, "ok": True, "bad": math.nan}},
    }
    found = numbers_of(state, telemetry, master={"late_s_max": 0.1})
    assert found["trainer"] == {"step": 4.0, "times/actor/training": 0.5}
    assert found["plane"] == {"queued": 3.0, "account/generated": 100.0, "account/discarded/stale": 4.0}
    assert found["instance/rollout-0"] == {"rate_tokens_s": 12.5, "state/working": 1.0}
    assert found["instance/guest"] == {"version": 3.0, "state/loading": 1.0}
    assert found["vertex/rollout-0"] == {
        "phase/running": 1.0,
        "restarts": 2.0,
        "version": 3.0,
        "busy": 1.0,
        "in/generate": 1.0,
        "queue": 1.0,
    }
    assert found["vertex/reward-0"] == {"phase/running": 1.0, "restarts": 2.0}, "it has not reported yet"
    assert found["master"].items() >= {"vertices/running": 4.0, "late_s_max": 0.1}.items()


def test_how_the_job_spent_its_time_is_known_after_its_last_row(series: SeriesStore) -> None:
    """The last row may replace one that was written while the trainer ran."""
    spent = {"spent_s": {"actor": {"training": 6.0}}}
    telemetry = {"trainer-0": {"version": None, "busy": "", "fields": spent}}
    runs = JobState(vertices={"trainer-0": running("trainer-0")})
    stopped = replace(running("trainer-0"), phase=VertexPhase.STOPPED)
    over = replace(runs, vertices={"trainer-0": stopped}, job=replace(runs.job, phase=JobPhase.STOPPED))
    recorder = Recorder(series)
    for state, at in ((runs, BASE), (over, BASE + TICK_S / 2)):
        recorder.record(numbers_of(state, telemetry), at=at)
    assert spent_by_role(series) == {"actor": {"training": 6.0}}
    waits = replace(over, job=runs.job)
    assert "trainer" not in numbers_of(waits, telemetry), "the next trainer has not reported yet"


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_whatever_a_workload_reports_its_numbers_are_finite_and_few(fields: Any) -> None:
    telemetry = {"a-0": {"version": fields, "busy": fields, "fields": fields}}
    found = numbers_of(JobState(vertices={"a-0": running("a-0")}), telemetry)["vertex/a-0"]
    assert len(found) <= MOST_NUMBERS
    assert all(math.isfinite(value) for value in found.values())
    assert numbers_in(unpack(pack(frame_of({"vertex/a-0": found})))) == {"vertex/a-0": found}


def test_a_source_has_so_many_numbers_at_most() -> None:
    assert len(flat({str(number): number for number in range(10_000)})) == MOST_NUMBERS


# -- frames -----------------------------------------------------------------------------------------


@given(NUMBERS)
@settings(max_examples=examples(100), deadline=None)
def test_what_is_written_is_read(numbers: Numbers) -> None:
    assert numbers_in(unpack(pack(frame_of(numbers)))) == {s: n for s, n in numbers.items() if n}


@pytest.mark.parametrize("body", [b"", b"x" * 100, pack(frame_of({"a": {"x": 1.0}}))[:-3]])
def test_a_damaged_row_is_a_sentence(body: bytes) -> None:
    with pytest.raises(StoreCorrupt, match="numbers"):
        unpack(body)


def means(moments: list[Numbers]) -> Numbers:
    """As the definition says it, number by number."""
    found: Numbers = {}
    for source in {source for one in moments for source in one if one[source]}:
        there = [one[source] for one in moments if one.get(source)]
        for name in {name for one in there for name in one}:
            values = [one[name] for one in there if name in one]
            if name.endswith("_max"):
                value = max(values)
            else:
                value = sum(values) / (len(there) if name.startswith("state/") else len(values))
            found.setdefault(source, {})[name] = value
    return found


@given(st.lists(NUMBERS, min_size=1, max_size=6))
@settings(max_examples=examples(150), deadline=None)
def test_the_mean_of_frames_is_that_of_each_number(moments: list[Numbers]) -> None:
    frames: list[Frame] = [frame_of(one) for one in moments]
    found, expected = numbers_in(mean_of(frames)), means(moments)
    assert found.keys() == expected.keys()
    for source, numbers in expected.items():
        assert found[source] == pytest.approx(numbers)


# -- kept and read ----------------------------------------------------------------------------------


def record(recorder: Recorder, seconds: float, *, begin: float = 0.0, step_s: int = TICK_S) -> None:
    for at in range(int(begin), int(begin + seconds), step_s):
        recorder.record({"trainer": {"at": float(at), "loss_max": float(at % 60)}}, at=BASE + at + 0.3)


def test_ticks_become_minutes_and_quarters_and_old_ones_go(series: SeriesStore) -> None:
    record(Recorder(series), 24 * 3600, step_s=300)
    record(Recorder(series), 2 * 3600, begin=24 * 3600, step_s=30)
    extents = series.extents()
    assert extents[5].first == pytest.approx(BASE + 25 * 3600, abs=90)
    assert extents[60].first == pytest.approx(BASE + 2 * 3600, abs=400)
    assert (extents[900].first, extents[900].rows) == (BASE, 26 * 4 - 1), "the last one is not over"
    (minute,) = series.rows(60, since=BASE + 25 * 3600, until=BASE + 25 * 3600 + 60)
    assert numbers_in(unpack(minute.body)) == {"trainer": {"at": 25 * 3600 + 15.0, "loss_max": 30.0}}
    (quarter,) = series.rows(900, since=BASE, until=BASE + 900)
    assert numbers_in(unpack(quarter.body)) == {"trainer": {"at": 300.0, "loss_max": 0.0}}


def test_what_is_read_reaches_from_the_first_second_to_the_last(series: SeriesStore) -> None:
    record(Recorder(series), 3 * 3600)
    for points in (1, 10, 100, 1000):
        found = read_series(series, points=points)
        values = found.series["trainer"]["at"]
        assert len(values) <= points + 1
        assert values[0][0] <= BASE
        assert values[-1][0] + found.resolution_s >= BASE + 3 * 3600 - 5
        assert [at for at, _ in values] == sorted({at for at, _ in values})
    newest = read_series(series, since=BASE + 3 * 3600 - 300, points=300)
    assert newest.resolution_s == TICK_S
    assert newest.series["trainer"]["at"][-1] == (BASE + 3 * 3600 - 5, 3 * 3600.0 - 5)
    long_ago = read_series(series, since=BASE, until=BASE + 600, points=300)
    assert long_ago.resolution_s == MINUTES.resolution_s, "there are no ticks of so long ago"
    assert len(long_ago.series["trainer"]["at"]) == 10


def test_a_recorder_of_the_next_master_goes_on(series: SeriesStore) -> None:
    record(Recorder(series), 90)
    record(Recorder(series), 7200, begin=5 * 3600)
    assert [row.at for row in series.rows(60, since=0.0, until=BASE + 180)] == [BASE, BASE + 60]
    found = read_series(series, points=10)
    assert found.series["trainer"]["at"][0][0] <= BASE
    assert found.series["trainer"]["at"][-1][1] > 5 * 3600


def test_many_missing_minutes_are_made_bit_by_bit(series: SeriesStore) -> None:
    quiet = Recorder(series)
    quiet._thinned_at = math.inf
    quiet.thin = lambda *, now: None  # type: ignore[method-assign]
    record(quiet, 3600)
    record(Recorder(series), 7 * 60, begin=3600)
    rows = series.rows(60, since=0.0, until=BASE + 7200)
    assert [row.at for row in rows] == [BASE + 60.0 * minute for minute in range(66)]


def test_a_share_is_none_where_it_is_not_told(series: SeriesStore) -> None:
    recorder = Recorder(series)
    for at in range(0, 60, 5):
        state = "working" if at % 10 else "idle"
        recorder.record({"instance/r-0": {f"state/{state}": 1.0, "rate": 1.0}}, at=BASE + at)
    found = read_series(series).series["instance/r-0"]
    assert [value for _, value in found["state/working"]] == [0.0, 1.0] * 6
    (mean,) = read_series(series, points=1).series["instance/r-0"]["state/idle"]
    assert mean[1] == 0.5


def test_only_what_is_asked_for_is_given(series: SeriesStore) -> None:
    Recorder(series).record(
        {"vertex/rollout-1": {"x": 1.0, "y": 2.0}, "vertex/rollout-10": {"x": 3.0}, "trainer": {"x": 4.0}},
        at=BASE,
    )
    assert set(read_series(series, prefix="vertex").series) == {"vertex/rollout-1", "vertex/rollout-10"}
    assert set(read_series(series, prefix="vertex/rollout-1").series) == {"vertex/rollout-1"}
    assert read_series(series, names=["y"]).series == {"vertex/rollout-1": {"y": [(BASE, 2.0)]}}
    assert read_series(series, since=BASE + 100).series == {}
    assert is_meant("trainer", "trainer")
    assert not is_meant("trainer", "train")


def test_how_roles_spent_their_time_is_what_the_last_trainer_said_last(series: SeriesStore) -> None:
    assert spent_by_role(series) == {}
    recorder = Recorder(series)
    earlier = {"spent_s/actor/training": 90.0, "spent_s/actor/getting ready": 9.0, "step": 3.0}
    later = {"spent_s/actor/training": 6.0, "spent_s/rollout/waits for actor (training)": 5.0, "step": 4.0}
    for at in range(300):
        recorder.record({"trainer": earlier if at < 150 else later, "plane": later}, at=BASE + 5 * at)
    assert spent_by_role(series) == {
        "actor": {"training": 6.0},
        "rollout": {"waits for actor (training)": 5.0},
    }


def test_an_answer_is_bounded(series: SeriesStore) -> None:
    draw = random.Random(1)
    for at in range(0, 100, 5):
        Recorder(series).record(
            {f"vertex/r-{n}": {str(k): draw.random() for k in range(10)} for n in range(3000)}, at=BASE + at
        )
    found = read_series(series)
    assert found.cut
    values = sum(len(pairs) for numbers in found.series.values() for pairs in numbers.values())
    assert MOST_VALUES * 0.9 < values <= MOST_VALUES


def test_many_sources_have_longer_ticks_and_too_many_bytes_go() -> None:
    assert [tick_for(sources) for sources in (0, 200, 10_000, 10**6)] == [5, 5, 25, LONGEST_TICK_S]
    old = forget_before(TICKS, now=BASE, size_bytes=0, first=BASE - 9000, last=BASE)
    assert old == BASE - 3600
    large = forget_before(QUARTERS, now=BASE, size_bytes=4 * QUARTERS.at_most_bytes, first=0.0, last=1000.0)
    assert large == 750.0
    assert forget_before(QUARTERS, now=BASE, size_bytes=1, first=0.0, last=1000.0) == -math.inf
