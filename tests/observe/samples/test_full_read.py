"""What the reader finds is what a plain read of every column of every row finds, whatever is asked, whoever wrote."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.observe.samples import files as files_module
from gyre.observe.samples import narrow as narrow_module
from gyre.observe.samples.files import SampleFiles, histogram
from gyre.observe.samples.names import step_of
from gyre.observe.samples.narrow import KEY, narrow_of, packed, packed_at_end
from gyre.observe.samples.query import Condition, Order, SampleFilter
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import Group, InstanceRun, Sample, VersionRun
from tests.examples import examples
from tests.observe.samples.some_groups import group, sample, wait_until_idle, written
from tests.waits import GENEROUS_S

REWARDS = (-1.0, 0.0, 0.25, 0.5, 1.0)
INSTANCES = ("rollout-0", "rollout-1", "spot-7")

samples = st.builds(
    lambda reward, length, version, name, finish, moved: sample(
        [5] * length,
        reward,
        finish_reason=finish,
        versions=(VersionRun(version, 0, 1), VersionRun(version + moved, 1, length)),
        instances=(InstanceRun(name, 0, 1), InstanceRun(INSTANCES[moved], 1, length)),
    ),
    st.sampled_from([None, *REWARDS]),
    st.integers(2, 5),
    st.integers(0, 2),
    st.sampled_from(INSTANCES),
    st.sampled_from(["stop", "length"]),
    st.integers(0, 1),
)
members = st.lists(samples, min_size=1, max_size=4)
steps = st.lists(st.lists(members, max_size=4), min_size=1, max_size=4)
signs = st.sampled_from(["<", "<=", ">", ">=", "=", "==", "!="])
conditions = st.builds(Condition, signs, st.sampled_from(REWARDS))
lengths = st.builds(Condition, signs, st.integers(1, 6).map(float))
filters = st.builds(
    SampleFilter,
    step=st.none() | st.integers(0, 4),
    group=st.none() | st.integers(1, 6),
    reward=st.lists(conditions, max_size=2).map(tuple),
    tokens=st.lists(lengths, max_size=2).map(tuple),
    outcome=st.sampled_from([None, "trained", "stale", "length", "quarantined", "nothing"]),
    instance=st.sampled_from([None, *INSTANCES, "gone"]),
    version=st.none() | st.integers(0, 3),
    quarantined=st.sampled_from([None, True, False]),
)


def keep(folder: Path, made: Sequence[Sequence[Sequence[Sample]]], is_last_quarantined: bool) -> None:
    number = 0

    def numbered(of: Sequence[Sample]) -> Group:
        nonlocal number
        number += 1
        return group(number, *of)

    def write(writer: SampleWriter) -> None:
        for step, groups in enumerate(made, 1):
            numbers = [numbered(of) for of in groups]
            for one in numbers[2:]:
                writer.not_trained(one, "stale")
            writer.step_recorded(step, numbers[:2])
            wait_until_idle(writer)
        if is_last_quarantined:
            writer.quarantined(len(made), numbered([sample(reward=0.25)]), "poisonous")

    assert written(folder, write) == []


def plain_rows(folder: Path) -> list[dict[str, Any]]:
    """Every row of every file with all of its columns, in the order of steps and then of quarantined groups."""
    paths = sorted(folder.iterdir(), key=lambda path: (step_of(path.name) is None, path.name))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def lets_through(wanted: SampleFilter, row: Mapping[str, Any]) -> bool:
    return (
        wanted.step in (None, row["step"])
        and wanted.group in (None, row["group"])
        and all(row["reward"] is not None and one.holds(row["reward"]) for one in wanted.reward)
        and all(one.holds(row["tokens"]) for one in wanted.tokens)
        and wanted.outcome in (None, row["outcome"], row["finish_reason"])
        and wanted.quarantined in (None, row["quarantined"])
        and (wanted.version is None or any(run["version"] == wanted.version for run in row["versions"]))
        and (wanted.instance is None or any(run["name"] == wanted.instance for run in row["instances"]))
    )


def plain_find(
    rows: Sequence[Mapping[str, Any]], wanted: SampleFilter, order: Order, limit: int, offset: int
) -> dict[str, Any]:
    found = [row for row in rows if lets_through(wanted, row)]

    def key(row: Mapping[str, Any]) -> float:
        if order == "step":
            return -float(row["step"])
        reward = row["reward"]
        return math.inf if reward is None else float(reward) * (1 if order == "worst" else -1)

    rewards = [math.nan if row["reward"] is None else row["reward"] for row in found]
    return {
        "samples": [
            files_module._item(dict(row), cut=files_module.TEXT_CUT)
            for row in sorted(found, key=key)[offset : offset + limit]
        ],
        "total": len(found),
        "histogram": histogram(pa.array(rewards, pa.float64()).to_numpy()),
    }


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), made=steps, is_last_quarantined=st.booleans())
def test_what_is_found_is_what_a_plain_read_finds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, made: Any, is_last_quarantined: bool
) -> None:
    folder = tmp_path_factory.mktemp("job") / "samples"
    keep(folder, made, is_last_quarantined)
    rows = plain_rows(folder)
    for path in sorted(folder.iterdir()):
        if data.draw(st.booleans(), label=f"somebody writes {path.name} anew"):
            pq.write_table(pq.read_table(path), path)
    kept = SampleFiles(folder)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="memory is short"):
            patch.setattr(files_module, "MOST_KEPT_SAMPLES", 3)
        for _ in range(8):
            wanted = data.draw(filters)
            order: Order = data.draw(st.sampled_from(["step", "worst", "best"]))
            limit, offset = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 12))
            plain = plain_find(rows, wanted, order, limit, offset)
            assert SampleFiles(folder).find(wanted, order=order, limit=limit, offset=offset) == plain
            assert kept.find(wanted, order=order, limit=limit, offset=offset) == plain
    assert kept.problems == {}


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=members, more=st.dictionaries(st.text(min_size=1), st.text()), first=st.integers(8, 5000))
def test_what_is_packed_at_an_end_is_what_the_columns_say(
    tmp_path_factory: pytest.TempPathFactory, made: Any, more: dict[str, str], first: int
) -> None:
    """However much of the end is read at first, whoever wrote it anew, whatever else an end says, also of the key."""
    folder = tmp_path_factory.mktemp("job") / "samples"
    keep(folder, [[made]], is_last_quarantined=False)
    (path,) = folder.iterdir()
    table = pq.read_table(path)
    wanted = narrow_of(table, 1)
    again = {**{key: value for key, value in more.items() if key.encode() != KEY}, KEY: packed(wanted)}
    pq.write_table(table.replace_schema_metadata(again), folder / "again")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_module, "_AT_FIRST", first)
        found = [packed_at_end(str(one), 1) for one in (path, folder / "again")]
    for one in found:
        assert one is not None
        assert packed(one) == packed(wanted)
    pq.write_table(table.replace_schema_metadata({"gyre.step": KEY}), path)
    assert packed_at_end(str(path), 1) is None, "the key alone is nothing that is packed"


@pytest.mark.parametrize("data", [b"", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"x" * 100])
def test_what_does_not_end_as_parquet_has_nothing_packed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.parquet"
    path.write_bytes(data)
    assert packed_at_end(str(path), 1) is None


def test_each_end_is_read_once_whatever_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "job", [[[sample()]] for _ in range(5)], is_last_quarantined=True)
    read: list[str] = []
    original = files_module._read_end

    def counted(file: Any) -> Any:
        read.append(file.name)
        return original(file)

    monkeypatch.setattr(files_module, "_read_end", counted)
    files = SampleFiles(tmp_path / "job")
    for _ in range(2):
        files.steps()
        for order in ("step", "worst", "best"):
            files.find(SampleFilter(version=0), order=order, limit=2)  # type: ignore[arg-type]
        files.sample(1, 1, 0)
    assert sorted(read) == sorted(path.name for path in (tmp_path / "job").iterdir())


def test_who_asks_while_another_reads_waits_and_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "job", [[[sample()]] for _ in range(3)], is_last_quarantined=False)
    files = SampleFiles(tmp_path / "job")
    lock, waiting = threading.Lock(), [threading.Event(), threading.Event()]
    arrived = iter(waiting)

    class Told:
        def __enter__(self) -> None:
            next(arrived).set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    read: list[str] = []
    original = files_module._read_end

    def late(file: Any) -> Any:
        assert waiting[1].wait(GENEROUS_S)
        read.append(file.name)
        return original(file)

    monkeypatch.setattr(files, "_reading", Told())
    monkeypatch.setattr(files_module, "_read_end", late)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(files.find, SampleFilter()) for _ in range(2)]
        assert [one.result(GENEROUS_S)["total"] for one in asked] == [3, 3]
    assert len(read) == 3


def test_texts_are_read_of_the_files_alone_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "job", [[[sample()] * 3] for _ in range(5)], is_last_quarantined=False)
    opened: list[str] = []
    original = pq.ParquetFile

    def counted(path: Any, *args: Any, **more: Any) -> Any:
        opened.append(Path(path).name)
        return original(path, *args, **more)

    monkeypatch.setattr(pq, "ParquetFile", counted)
    files = SampleFiles(tmp_path / "job")
    assert files.find(SampleFilter(), limit=4)["total"] == 15
    assert sorted(opened) == ["step-00000004.parquet", "step-00000005.parquet"]
