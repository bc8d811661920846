"""What is handed over is written whole, or is left out and said; nobody waits for it, and nothing ends of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gyre.config import SamplesSpec
from gyre.observe.samples import writer as writer_module
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import PARTIAL
from gyre.observe.samples.query import SampleFilter
from gyre.observe.samples.texts import Texts
from gyre.observe.samples.writer import WAITING_STEPS, SampleWriter
from gyre.rollouts.samples import Group, InstanceRun, Sample, VersionRun
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.machine import small_disk
from tests.observe.samples.some_groups import group, kept, sample, wait_until_idle, written
from tests.waits import GENEROUS_S


class Task:
    tokenizer = CharTokenizer("0123456789+-*=")

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids)

    def answer_of(self, sample: Sample) -> str:
        return self.tokenizer.decode(sample.token_ids)


def test_a_sample_is_read_back_as_it_was_bit_by_bit(tmp_path: Path) -> None:
    one = sample(
        [4, 13, 2],
        0.1 + 0.2,
        versions=(VersionRun(3, 0, 1), VersionRun(4, 1, 3)),
        instances=(InstanceRun("rollout-0", 0, 2), InstanceRun("spot-7", 2, 3)),
        finish_reason="length",
        extras={
            "reward.format": 0.5,
            "reward.length": -2,
            "ref_logprobs": np.array([-1, -2, -3], np.float32),
            "values": np.array([0.1, 0.2, 0.3], np.float32),
            "old_logprobs": np.array([-0.1, -0.2, -0.3], np.float32),
            "note": "my own",
        },
    )
    files = kept(tmp_path, {7: [group(12, sample(), one, answer="7", row=4)]}, texts=Texts(Task()))
    found = files.sample(7, 12, 1)
    assert np.array(found["logprobs"], np.float32).tobytes() == one.logprobs.tobytes()
    for name, key in (("trainer_logprobs", "old_logprobs"), ("ref_logprobs",) * 2, ("values",) * 2):
        assert np.array(found[name], np.float32).tobytes() == one.extras[key].tobytes()
    assert found["reward"] == 0.1 + 0.2
    assert found["more"] == {"format": 0.5, "length": -2.0}
    assert found["versions"] == [[3, 0, 1], [4, 1, 3]]
    assert found["instances"] == [["rollout-0", 0, 2], ["spot-7", 2, 3]]
    assert (found["prompt_ids"], found["token_ids"]) == ([1, 15], [4, 13, 2])
    assert (found["prompt"], found["answer"]) == ("*", "1+")
    assert (found["prompt_pieces"], found["pieces"]) == (["<bos>", "*"], ["1", "+", "<eos>"])
    assert (found["prompt_tokens"], found["tokens"], found["finish_reason"]) == (2, 3, "length")
    assert (found["meta"], found["extras"]) == ({"answer": "7", "row": 4}, {"note": "my own"})
    assert (found["outcome"], found["quarantined"], found["advantage"]) == ("trained", False, None)


def test_advantages_are_those_that_the_loss_has(tmp_path: Path) -> None:
    def advantages(groups: Sequence[Group]) -> list[list[np.ndarray] | None]:
        return [
            [np.full(3, one.id + 0.25, np.float32), np.array([1, 2, 6], np.float32)] if one.id < 3 else None
            for one in groups
        ]

    files = kept(tmp_path, {1: [group(1), group(2), group(3)]}, advantages=advantages)
    assert [files.sample(1, number, 0)["advantage"] for number in (1, 2)] == [1.25, 2.25]
    assert files.sample(1, 3, 0)["advantage"] is None, "where it is not known"
    assert files.sample(1, 1, 1)["advantage"] == 3.0  # of a critic's, the mean over the tokens


def test_groups_that_were_not_trained_stand_with_the_step_that_was_made(tmp_path: Path) -> None:
    def write(writer: SampleWriter) -> None:
        writer.not_trained(group(5, sample(reward=0.0)), "no_gradient", "all earned the same")
        writer.not_trained(group(4, sample([9], reward=0.0)), "stale", "3 versions old")
        writer.step_recorded(1, [group(4), group(6)])
        writer.step_recorded(2, [group(7)], "not_finite")

    assert written(tmp_path, write) == []
    files = SampleFiles(tmp_path)
    page = files.find(SampleFilter(step=1))["samples"]
    assert [(one["group"], one["sample"], one["outcome"]) for one in page] == [
        (4, 0, "trained"),
        (4, 1, "trained"),
        (4, 0, "stale"),
        (5, 0, "no_gradient"),
        (6, 0, "trained"),
        (6, 1, "trained"),
    ]
    assert files.sample(1, 4, 0)["tokens"] == 3, "of two with one number it is the trained one"
    assert files.sample(1, 5, 0)["meta"] == {"evidence": "all earned the same"}
    assert {one["outcome"] for one in files.find(SampleFilter(step=2))["samples"]} == {"not_finite"}


def test_quarantined_groups_are_kept_whatever_the_settings(tmp_path: Path) -> None:
    def write(writer: SampleWriter) -> None:
        writer.quarantined(9, Group(41, np.array([1, 2], np.int32), {"q": 1}), "killed three engines")
        writer.quarantined(9, group(42), "a reward of nan")
        writer.step_recorded(1, [group(1)])

    assert written(tmp_path, write, settings=SamplesSpec(every=0)) == []
    files = SampleFiles(tmp_path)
    assert files.steps() == {"steps": [], "quarantined": 2}
    page = files.find(SampleFilter(quarantined=True))["samples"]
    assert [(one["step"], one["group"], one["sample"]) for one in page] == [
        (9, 41, 0),
        (9, 42, 0),
        (9, 42, 1),
    ]
    found = files.sample(9, 41, 0)
    assert found["meta"] == {"q": 1, "evidence": "killed three engines"}
    assert (found["outcome"], found["token_ids"], found["reward"]) == ("quarantined", [], None)


def test_steps_that_an_earlier_trainer_recorded_and_did_not_write_are_written(tmp_path: Path) -> None:
    kept(tmp_path, {1: [group(1)], 2: [group(2)]})
    before = (tmp_path / "step-00000002.parquet").stat().st_mtime_ns
    writer = SampleWriter(tmp_path, SamplesSpec(), spare_bytes=0)
    writer.begin({step: [group(step)] for step in range(2, 12)})  # more than may wait
    assert writer.end(within_s=GENEROUS_S)
    assert [row["step"] for row in SampleFiles(tmp_path).steps()["steps"]] == list(range(1, 12))
    assert (tmp_path / "step-00000002.parquet").stat().st_mtime_ns == before, "it was there"


def test_a_step_that_is_written_again_replaces_its_file_with_equal_content(tmp_path: Path) -> None:
    kept(tmp_path, {1: [group(1), group(2)]})
    first = (tmp_path / "step-00000001.parquet").read_bytes()
    kept(tmp_path, {1: [group(1), group(2)]})
    assert (tmp_path / "step-00000001.parquet").read_bytes() == first
    assert len(list(tmp_path.iterdir())) == 1


def test_old_steps_make_room_for_new_ones(tmp_path: Path) -> None:
    size = kept(tmp_path / "one", {1: [group(1)]}).steps()["steps"][0]["bytes"]
    settings = SamplesSpec(at_most_bytes=57 * size)
    files = kept(tmp_path / "all", {step: [group(step)] for step in range(1, 61)}, settings=settings)
    rows = files.steps()["steps"]
    assert sum(row["bytes"] for row in rows) <= settings.at_most_bytes
    steps = [row["step"] for row in rows]
    assert steps[0] == 1
    assert steps[-50:] == list(range(11, 61))
    assert [step for step in range(2, 11) if step not in steps] == [3, 5, 7, 9][: 60 - len(steps)]


# -- never in the way -------------------------------------------------------------------------------


def test_what_the_queue_has_no_room_for_is_left_out_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, free = threading.Event(), threading.Event()

    def hang(self: SampleWriter, work: Any) -> None:
        stuck.set()
        assert free.wait(GENEROUS_S)

    monkeypatch.setattr(SampleWriter, "_write", hang)
    said: list[str] = []
    writer = SampleWriter(tmp_path, SamplesSpec(), say=said.append)
    writer.begin()
    writer.step_recorded(1, [group(1)])
    assert stuck.wait(GENEROUS_S)
    for step in range(2, 2 + WAITING_STEPS + 3):
        writer.step_recorded(step, [group(step)])  # returns at once, or the test hangs here
    assert writer.left_out == 3
    assert len(said) == 1
    assert "takes longer than making steps" in said[0]
    assert not writer.end(within_s=0.0), "the end does not wait for it either"
    free.set()
    assert writer.end(within_s=GENEROUS_S)
    assert writer.written == 1 + WAITING_STEPS


def test_a_disk_without_room_ends_nothing_and_is_said_once(tmp_path: Path) -> None:
    with small_disk(1024) as disk:

        def write(writer: SampleWriter) -> None:
            writer.step_recorded(1, [group(1)])
            wait_until_idle(writer)
            disk.fill()
            for step in (2, 3):
                writer.step_recorded(step, [group(step)])
            wait_until_idle(writer)
            disk.resize(4096)
            writer.step_recorded(4, [group(4)])

        said = written(disk.path / "samples", write)
        assert [row["step"] for row in SampleFiles(disk.path / "samples").steps()["steps"]] == [1, 4]
        assert len(said) == 1
        assert said[0].startswith("the samples of step 2 are not kept")
        assert "Training goes on" in said[0]


def test_a_disk_that_fills_in_the_middle_of_a_file_leaves_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SampleWriter, "_check_room", lambda self, needed: None)
    noise = np.random.default_rng(1)
    large = [group(number, sample(noise.integers(0, 2**31 - 1, 40_000).tolist(), 0.0)) for number in range(8)]
    with small_disk(1024) as disk:
        said = written(disk.path, lambda writer: writer.step_recorded(1, large))
        assert len(said) == 1
        assert "No space left" in said[0]
        assert list(disk.path.iterdir()) == []


def test_samples_leave_the_job_its_room(tmp_path: Path) -> None:
    with small_disk(4096) as disk:
        (disk.path / "checkpoint").write_bytes(bytes(3 << 20))  # a quarter is free
        said = written(
            disk.path / "samples",
            lambda writer: writer.step_recorded(1, [group(1)]),
            spare_bytes=writer_module.SPARE_BYTES,
        )
        assert "samples leave 1 MiB to the job" in said[0]
        assert SampleFiles(disk.path / "samples").steps()["steps"] == []


def test_nobody_sees_a_file_before_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, seen = SampleFiles(tmp_path), []
    write = writer_module.write_table

    def watched(table: Any, path: Path) -> None:
        write(table, path)
        seen.append(files.steps()["steps"])

    monkeypatch.setattr(writer_module, "write_table", watched)
    kept(tmp_path, {4: [group(4)]})
    assert seen == [[]]
    assert [one["step"] for one in files.steps()["steps"]] == [4]


def test_what_a_dead_trainer_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".step-00000003.parquet.123{PARTIAL}").write_bytes(b"PAR1")
    kept(tmp_path, {4: [group(4)]})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.parquet"]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file is in the way")
    said = written(tmp_path / "samples", lambda writer: writer.step_recorded(1, [group(1)]))
    assert len(said) == 1
    assert "not kept" in said[0]


# -- whatever comes ---------------------------------------------------------------------------------


class Unreadable:
    class tokenizer:
        @staticmethod
        def piece(token: int) -> str:
            if token == 6:
                raise KeyError(token)
            return f"\ud83d{token}"

    @staticmethod
    def prompt_text(group: Group) -> str:
        return "half \udc80 of it"

    @staticmethod
    def answer_of(sample: Sample) -> str:
        raise IndexError("piece id is out of range")


def test_text_that_is_no_text_and_decoders_that_fail_cost_no_sample(tmp_path: Path) -> None:
    said = written(
        tmp_path, lambda writer: writer.step_recorded(1, [group(1, q="\ud800")]), texts=Texts(Unreadable())
    )
    assert len(said) == 1
    assert "some samples have no text" in said[0]
    found = SampleFiles(tmp_path).sample(1, 1, 0)
    assert found["prompt"] == "half \\udc80 of it"
    assert found["answer"] is None
    assert found["pieces"] == ["\\ud83d5", "", "\\ud83d7"]
    assert found["meta"] == {"q": "\\ud800"}


def test_rewards_and_extras_that_are_no_numbers_are_null_or_as_they_are(tmp_path: Path) -> None:
    odd = sample(
        [5, 6],
        float("nan"),
        extras={
            "reward.a": float("inf"),
            "reward.b": "text",
            "ref_logprobs": [1.0],
            "values": "x",
            "n": 10**30,
        },
    )
    files = kept(tmp_path, {1: [group(1, odd, sample(reward=None), sample(reward=2.0), loop=float("nan"))]})
    found = files.sample(1, 1, 0)
    assert np.isnan(found["reward"])
    assert found["more"] == {"a": float("inf"), "b": None}
    assert found["ref_logprobs"] is None
    assert found["values"] is None
    assert found["meta"] == {"loop": None}
    page = files.find(SampleFilter(), order="worst")
    assert [one["sample"] for one in page["samples"]] == [2, 0, 1], "those without a reward come last"
    assert page["histogram"] == {"edges": [2.0, 2.0], "counts": [1]}


def test_a_large_meta_is_cut_value_by_value(tmp_path: Path) -> None:
    files = kept(tmp_path, {1: [group(1, tests="x" * 100_000, answer=3)]})
    meta = files.sample(1, 1, 0)["meta"]
    assert meta["answer"] == 3
    assert meta["tests"] == "x" * 200


def test_a_group_that_cannot_be_made_a_row_costs_its_step_alone(tmp_path: Path) -> None:
    broken = group(1)
    broken.samples[0].versions = "none"  # type: ignore[assignment]

    def write(writer: SampleWriter) -> None:
        writer.step_recorded(1, [broken])
        writer.step_recorded(2, [group(2)])

    assert len(written(tmp_path, write)) == 1
    assert [row["step"] for row in SampleFiles(tmp_path).steps()["steps"]] == [2]


def test_the_columns_are_plain_parquet(tmp_path: Path) -> None:
    kept(tmp_path, {1: [group(1, sample(extras={"reward.a": 0.5}), answer=3)]})
    table = pq.read_table(tmp_path / "step-00000001.parquet")
    (row,) = table.to_pylist()
    assert row["more"] == [("a", 0.5)]
    assert json.loads(row["meta"]) == {"answer": 3}
    assert row["versions"] == [{"version": 0, "start": 0, "end": 3}]


def test_rows_are_kept_with_what_was_drawn(tmp_path: Path) -> None:
    mask = np.array([False, True, True, False, True])
    of = {"logprobs": np.where(mask, -1.0, 0.0).astype(np.float32), "mask": mask, "rollout": 2}
    rows = [replace(sample([5, 6, 7, 8, 9]), **of), sample()]
    own = {(1, 0): np.array([-2.0, -3.0, -4.0], np.float32), (1, 1): np.array([-5.0, -6.0, -7.0], np.float32)}
    assert (
        written(
            tmp_path / "s", lambda writer: writer.step_recorded(1, [group(1, *rows)], logprobs=lambda: own)
        )
        == []
    )
    (path,) = (tmp_path / "s").glob("step-*.parquet")
    first, second = pq.read_table(path).to_pylist()
    assert first["drawn"] == [{"start": 1, "end": 3}, {"start": 4, "end": 5}]
    assert (first["rollout"], second["rollout"], second["drawn"]) == (2, None, None)
    assert first["trainer_logprobs"] == [0.0, -2.0, -3.0, 0.0, -4.0]
    assert second["trainer_logprobs"] == [-5.0, -6.0, -7.0]
    found = SampleFiles(tmp_path / "s").sample(1, 1, 0)
    assert (found["mask"], found["rollout"]) == (mask.tolist(), 2)
    assert SampleFiles(tmp_path / "s").sample(1, 1, 1)["mask"] is None


def test_a_file_of_before_there_were_rows_is_read(tmp_path: Path) -> None:
    def write(writer: SampleWriter) -> None:
        writer.step_recorded(1, [group(1)])
        writer.evaluated(3, "aime", [group(0, sample(reward=1.0), sample(reward=0.0))], right_from=1.0)

    assert written(tmp_path / "s", write) == []
    for path in (tmp_path / "s").rglob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["rollout", "drawn"]), path)
    files = SampleFiles(tmp_path / "s")
    (one, _) = files.find(SampleFilter())["samples"]
    assert one["rollout"] is None
    assert files.sample(1, 1, 0)["mask"] is None
    (prompt,) = files.held_out("aime")["prompts"]
    assert (prompt["now"]["count"], prompt["now"]["right"]) == (2, 1)
    assert files.problems == {}


def test_held_out_answers_in_rows_are_counted_by_their_rollouts(tmp_path: Path) -> None:
    rows = [(1.0, 0), (1.0, 0), (0.0, 1), (1.0, 0)]
    of = group(
        0,
        *(replace(sample([at, 3, 4], reward), rollout=rollout) for at, (reward, rollout) in enumerate(rows)),
    )
    assert written(tmp_path / "s", lambda writer: writer.evaluated(3, "aime", [of], right_from=1.0)) == []
    (prompt,) = SampleFiles(tmp_path / "s").held_out("aime")["prompts"]
    assert (prompt["now"]["count"], prompt["now"]["right"], prompt["now"]["reward"]) == (2, 1, 0.5)
    assert [one["sample"] for one in prompt["now"]["samples"]] == [3, 2]
