"""A checkpoint on its way to the disk, of a gang of one: what the ranks of Megatron and of FSDP2 have in common."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.state_files import is_broken, problem_with, read_record
from gyre.workloads.gang.world import World
from gyre.workloads.learner import checkpoint_writer
from gyre.workloads.learner.checkpoint_writer import CheckpointWriter, RankWrite, of_bytes
from gyre.workloads.learner.errors import CheckpointMismatch
from tests.waits import GENEROUS_S

CPU = torch.device("cpu")


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    world = World(WorkloadContext("j", "actor", 0, 1), device=CPU, timeout_s=GENEROUS_S)
    found = CheckpointWriter(world, CPU)
    try:
        yield found
    finally:
        found.close()
        world.close()


def begin(writer: CheckpointWriter, path: Path, write: RankWrite, *, digest: str | None = "a digest") -> None:
    path.mkdir(exist_ok=True)
    writer.begin(path, lambda found: {"step": 1, "digest": found}, lambda: digest, lambda: write)


def record(offsets: Sequence[int]) -> dict[str, Any]:
    return {"offsets": list(offsets)}


def state_of(path: Path) -> list[float]:
    found = read_record(path)
    assert problem_with(path, found) == ""
    return torch.frombuffer(bytearray(path.read_bytes()[:12]), dtype=torch.float32).tolist()


def test_what_is_written_is_the_state_when_the_write_began(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, write = threading.Event(), checkpoint_writer._write_files

    def late(*given: Any) -> None:
        assert trained.wait(GENEROUS_S)
        write(*given)

    monkeypatch.setattr(checkpoint_writer, "_write_files", late)
    weights, path = torch.tensor([1.0, 2.0, 3.0]), tmp_path / "a"
    begin(writer, path, writer.of_tensors(path / "rank_00000.state", [weights], record))
    assert not writer.is_written(wait=False)
    assert not (path / "actor.json").exists()
    weights.zero_()
    trained.set()
    assert writer.is_written(wait=True)
    assert state_of(path / "rank_00000.state") == [1.0, 2.0, 3.0]
    content = json.loads((path / "actor.json").read_text())
    assert not is_broken(content)
    assert (content["step"], content["digest"]) == (1, "a digest")
    assert writer.status().keys() == {"hold_s"}


def test_without_room_for_a_copy_it_is_written_before_training_goes_on(
    writer: CheckpointWriter, tmp_path: Path
) -> None:
    writer._buffer._machine.available = lambda: (0, 1 << 40)
    weights, path = torch.tensor([1.0, 2.0, 3.0]), tmp_path / "a"
    found = writer.of_tensors(path / "rank_00000.state", [weights], record)
    assert found.reads_state
    begin(writer, path, found)
    weights.zero_()
    assert writer.is_written(wait=True)
    assert state_of(path / "rank_00000.state") == [1.0, 2.0, 3.0]
    assert "would leave less than" in writer.status()["trouble"]


def test_tensors_that_are_copies_are_not_copied_again(writer: CheckpointWriter, tmp_path: Path) -> None:
    writer._buffer._machine.available = lambda: (0, 1 << 40)
    found = writer.of_tensors(tmp_path / "rank_00000.state", [torch.ones(3)], record, are_copies=True)
    assert not found.reads_state
    begin(writer, tmp_path, found)
    assert writer.is_written(wait=True)
    assert state_of(tmp_path / "rank_00000.state") == [1.0] * 3


def test_the_next_one_stops_the_one_before_it(writer: CheckpointWriter, tmp_path: Path) -> None:
    told: list[str] = []

    def until_stopped(stop: threading.Event) -> None:
        told.append("stopped" if stop.wait(GENEROUS_S) else "never stopped")

    first = RankWrite(
        until_stopped, finish=lambda: told.append("finished"), release=lambda: told.append("released")
    )
    begin(writer, tmp_path / "first", first)
    begin(writer, tmp_path / "second", RankWrite(lambda _: None))
    assert told == ["stopped", "released"]
    assert writer.is_written(wait=True)
    assert writer.is_written(wait=False), "there is nothing to be written any more"
    assert [path.parent.name for path in tmp_path.rglob("actor.json")] == ["second"]
    assert told == ["stopped", "released"]


def test_closing_stops_it_too(writer: CheckpointWriter, tmp_path: Path) -> None:
    stopped: list[bool] = []
    begin(writer, tmp_path, RankWrite(lambda stop: stopped.append(stop.wait(GENEROUS_S))))
    writer.close()
    assert stopped == [True]
    assert not (tmp_path / "actor.json").exists()


def test_bytes_of_others_are_released_and_what_all_do_at_the_end_is_done_once(
    writer: CheckpointWriter, tmp_path: Path
) -> None:
    told: list[str] = []
    held = memoryview(torch.arange(3.0).numpy().view("uint8"))
    mine = of_bytes(
        tmp_path / "rank_00000.state", [held], record([0]), release=lambda: told.append("released")
    )
    begin(
        writer, tmp_path, RankWrite(mine.write, finish=lambda: told.append("finished"), release=mine.release)
    )
    assert writer.is_written(wait=True)
    assert told == ["released", "finished"]
    assert state_of(tmp_path / "rank_00000.state") == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("where", ["the state", "the digest", "the last file"])
def test_what_cannot_be_written_is_no_checkpoint(
    writer: CheckpointWriter, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    write = full if where == "the state" else lambda _: None
    if where == "the last file":
        monkeypatch.setattr(checkpoint_writer, "write_json", full)
    writer.begin(
        tmp_path,
        lambda found: {"digest": found},
        full if where == "the digest" else lambda: None,
        lambda: RankWrite(
            write, finish=lambda: told.append("finished"), release=lambda: told.append("released")
        ),
    )
    with pytest.raises(CheckpointMismatch, match=r"could not be written: .*No space left") as caught:
        writer.is_written(wait=True)
    assert isinstance(caught.value.__cause__, OSError)
    assert "disk is full" in caught.value.hint
    assert told == (["released", "finished"] if where == "the last file" else ["released"])
    assert not (tmp_path / "actor.json").exists()
    assert writer.is_written(wait=False), "it is over"
