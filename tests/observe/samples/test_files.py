"""The reader: which samples are found, in which order, and what a file that is torn costs."""

from __future__ import annotations

from pathlib import Path

import msgpack
import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard

from gyre.errors import NotFound
from gyre.observe.samples import files as files_module
from gyre.observe.samples import writer as writer_module
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.narrow import KEY, NARROW, narrow_of, unpacked
from gyre.observe.samples.query import Order, SampleFilter, conditions_in
from gyre.rollouts.samples import InstanceRun, VersionRun
from tests.observe.samples.some_groups import group, kept, sample

STEPS = {
    1: [group(1, sample(reward=0.0), sample(reward=1.0)), group(2, sample(reward=0.5))],
    2: [
        group(3, sample([5, 6, 7, 8], reward=-1.0, finish_reason="length"), sample(reward=0.25, version=1)),
        group(
            4,
            sample(
                reward=2.0,
                versions=(VersionRun(0, 0, 1), VersionRun(1, 1, 3)),
                instances=(InstanceRun("rollout-0", 0, 2), InstanceRun("spot-1", 2, 3)),
            ),
        ),
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SampleFiles:
    return kept(tmp_path_factory.mktemp("samples"), STEPS)


def names(files: SampleFiles, wanted: SampleFilter, order: Order = "step") -> list[tuple[int, int, int]]:
    page = files.find(wanted, order=order)
    assert page["total"] == len(page["samples"])
    return [(one["step"], one["group"], one["sample"]) for one in page["samples"]]


def test_the_steps_are_counted(files: SampleFiles) -> None:
    found = files.steps()
    assert [(row["step"], row["samples"], row["groups"]) for row in found["steps"]] == [(1, 3, 2), (2, 3, 2)]
    assert all(row["bytes"] > 1000 for row in found["steps"])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (SampleFilter(), [(2, 3, 0), (2, 3, 1), (2, 4, 0), (1, 1, 0), (1, 1, 1), (1, 2, 0)]),
        (SampleFilter(step=1), [(1, 1, 0), (1, 1, 1), (1, 2, 0)]),
        (SampleFilter(step=3), []),
        (SampleFilter(group=3), [(2, 3, 0), (2, 3, 1)]),
        (SampleFilter(reward=conditions_in("<0.3,>=0")), [(2, 3, 1), (1, 1, 0)]),
        (SampleFilter(tokens=conditions_in(">3")), [(2, 3, 0)]),
        (SampleFilter(tokens=conditions_in("3"), step=2), [(2, 3, 1), (2, 4, 0)]),
        (SampleFilter(outcome="length"), [(2, 3, 0)]),
        (SampleFilter(outcome="trained", step=1, group=2), [(1, 2, 0)]),
        (SampleFilter(outcome="stale"), []),
        (SampleFilter(instance="spot-1"), [(2, 4, 0)]),
        (SampleFilter(instance="spot"), []),
        (SampleFilter(version=1), [(2, 3, 1), (2, 4, 0)]),
        (SampleFilter(version=0, step=2), [(2, 3, 0), (2, 4, 0)]),
        (SampleFilter(quarantined=True), []),
    ],
)
def test_a_filter_lets_through(
    files: SampleFiles, wanted: SampleFilter, found: list[tuple[int, int, int]]
) -> None:
    assert names(files, wanted) == found


def test_the_worst_and_the_best_come_first(files: SampleFiles) -> None:
    worst = names(files, SampleFilter(), "worst")
    assert worst == [(2, 3, 0), (1, 1, 0), (2, 3, 1), (1, 2, 0), (1, 1, 1), (2, 4, 0)]
    assert names(files, SampleFilter(), "best") == worst[::-1]


@pytest.mark.parametrize("order", ["step", "worst", "best"])
def test_pages_are_the_whole_cut_up(files: SampleFiles, order: Order) -> None:
    whole = names(files, SampleFilter(), order)
    for size in (1, 2, 4, 6):
        pages = [
            (one["step"], one["group"], one["sample"])
            for offset in range(0, 8, size)
            for one in files.find(SampleFilter(), order=order, limit=size, offset=offset)["samples"]
        ]
        assert pages == whole


def test_the_histogram_is_of_all_that_match(files: SampleFiles) -> None:
    found = files.find(SampleFilter(), limit=1)["histogram"]
    assert (found["edges"][0], found["edges"][-1]) == (-1.0, 2.0)
    assert len(found["edges"]) == len(found["counts"]) + 1
    assert sum(found["counts"]) == 6


def test_texts_are_cut_in_a_list_and_whole_alone(tmp_path: Path) -> None:
    class Long:
        def answer_of(self, sample: object) -> str:
            return "ä" * 5000

    from gyre.observe.samples.texts import Texts

    files = kept(tmp_path, {1: [group(1)]}, texts=Texts(Long()))
    assert len(files.find(SampleFilter())["samples"][0]["answer"]) == files_module.TEXT_CUT
    assert len(files.sample(1, 1, 0)["answer"]) == 5000


def test_a_sample_that_is_not_there_is_not_found(files: SampleFiles) -> None:
    for where in ((1, 1, 2), (1, 9, 0), (3, 1, 0)):
        with pytest.raises(NotFound, match="There is no sample"):
            files.sample(*where)


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "none")
    assert not files.exists
    assert files.steps() == {"steps": [], "quarantined": 0}
    assert files.find(SampleFilter())["total"] == 0


@pytest.mark.parametrize("tear", ["half", "empty", "noise", "other"])
def test_a_torn_file_is_skipped_with_a_sentence(tmp_path: Path, tear: str) -> None:
    kept(tmp_path, STEPS)
    torn = tmp_path / "step-00000002.parquet"
    data = torn.read_bytes()
    if tear == "other":
        pq.write_table(pq.read_table(torn, columns=["step"]), torn)
    else:
        torn.write_bytes({"half": data[: len(data) // 2], "empty": b"", "noise": b"x" * len(data)}[tear])
    (tmp_path / "notes.txt").write_text("somebody's")
    files = SampleFiles(tmp_path)
    assert names(files, SampleFilter()) == [(1, 1, 0), (1, 1, 1), (1, 2, 0)]
    (problem,) = files.problems.values()
    assert str(torn) in problem
    assert "\n" not in problem


def test_an_index_that_is_damaged_is_a_torn_file(tmp_path: Path) -> None:
    kept(tmp_path, STEPS)
    torn = tmp_path / "step-00000001.parquet"
    table = pq.read_table(torn)
    with pq.ParquetWriter(torn, table.schema) as file:
        file.write_table(table)
        file.add_key_value_metadata({KEY: b"noise"})
    files = SampleFiles(tmp_path)
    assert {step for step, _, _ in names(files, SampleFilter())} == {2}
    assert "index is damaged" in files.problems[torn.name]


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    files = kept(tmp_path, {1: [group(1)]})
    assert files.find(SampleFilter())["total"] == 2
    kept(tmp_path, {1: [group(1), group(2)]})
    assert files.find(SampleFilter())["total"] == 4
    assert files.steps()["steps"][0]["groups"] == 2
    (tmp_path / "step-00000001.parquet").unlink()
    assert files.find(SampleFilter())["total"] == 0
    assert files.problems == {}


def test_what_is_packed_is_what_the_columns_say(tmp_path: Path) -> None:
    kept(tmp_path, STEPS)
    path = tmp_path / "step-00000002.parquet"
    by_columns = narrow_of(pq.read_table(path, columns=list(NARROW)), 2)
    packed = unpacked(pq.read_metadata(path).metadata[KEY], 2)
    assert packed is not None
    plain = (
        "steps",
        "groups",
        "samples",
        "rewards",
        "tokens",
        "quarantined",
        "version_rows",
        "version_values",
    )
    for name in plain:
        one, other = getattr(by_columns, name), getattr(packed, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    for name in ("outcomes", "finishes", "instance_values"):
        one, other = getattr(by_columns, name), getattr(packed, name)
        assert [one.names[code] for code in one.codes] == [other.names[code] for code in other.codes]


def test_a_table_that_somebody_wrote_anew_is_read_by_its_columns(tmp_path: Path) -> None:
    before = names(kept(tmp_path, STEPS), SampleFilter(version=1))
    for path in tmp_path.glob("*.parquet"):
        pq.write_table(pq.read_table(path), path)
    assert names(SampleFiles(tmp_path), SampleFilter(version=1)) == before


def test_an_index_of_another_version_leaves_it_to_the_columns(tmp_path: Path) -> None:
    wanted = SampleFilter(tokens=conditions_in(">3"))
    before = names(kept(tmp_path, STEPS), wanted)
    for path in tmp_path.glob("*.parquet"):
        table = pq.read_table(path)
        with pq.ParquetWriter(path, table.schema) as file:
            file.write_table(table)
            file.add_key_value_metadata({KEY: zstandard.compress(msgpack.packb([1, [], []]))})
    files = SampleFiles(tmp_path)
    assert names(files, wanted) == before
    assert files.problems == {}


@pytest.mark.parametrize(("worth_parts_bytes", "parts"), [(0, [512, 512, 376]), (4 << 20, [1400])])
def test_samples_far_apart_in_a_large_file_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth_parts_bytes: int, parts: list[int]
) -> None:
    monkeypatch.setattr(writer_module, "WORTH_PARTS_BYTES", worth_parts_bytes)
    groups = [group(number, *[sample([number % 7, 3], float(number))] * 2) for number in range(700)]
    files = kept(tmp_path, {1: groups})
    (path,) = tmp_path.glob("*.parquet")
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)] == parts
    page = files.find(SampleFilter(), order="best", limit=3)["samples"]
    assert [(one["group"], one["sample"]) for one in page] == [(699, 0), (699, 1), (698, 0)]
    wanted = SampleFilter(reward=conditions_in("<2"))
    assert [one["group"] for one in files.find(wanted)["samples"]] == [0, 0, 1, 1]
    mixed = files._read(files._files()[0], [1300, 2, 700], ["group"])
    assert [row["group"] for row in mixed] == [650, 1, 350]
