"""A rank's state on the disk: whole with its record, or refused; and copied into memory that is taken once."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gyre.workloads.gang import state_files
from gyre.workloads.gang.host_buffer import HostBuffer
from gyre.workloads.gang.machine_memory import MachineMemory
from gyre.workloads.gang.state_files import (
    PAGE_BYTES,
    StateDamaged,
    WriteStopped,
    is_broken,
    problem_with,
    read_at,
    read_record,
    record_path,
    sealed,
    write_state,
)


def memory(size: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, size))
    view[:] = bytes(at % 251 for at in range(size))
    return view


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 2 * PAGE_BYTES)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_pieces_come_back_where_they_were_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, cached: bool
) -> None:
    if cached:

        def refused(*_: object) -> bool:
            return False

        monkeypatch.setattr(state_files, "_is_aligned", refused)
        monkeypatch.setattr(state_files, "_FLUSH_BYTES", PAGE_BYTES)
    first, second = memory(5 * PAGE_BYTES), memory(PAGE_BYTES + 300)
    path = tmp_path / "rank.state"
    size = write_state(path, [first, second], {"parts": [1]}, stop=threading.Event(), threads=threads)
    assert size == path.stat().st_size == 6 * PAGE_BYTES + 300
    record = read_record(path)
    assert record["parts"] == [1]
    assert problem_with(path, record) == ""
    content = path.read_bytes()
    assert content[: len(first)] == first
    assert content[len(first) :] == second
    found = memoryview(bytearray(300))
    descriptor = os.open(path, os.O_RDONLY)
    read_at(descriptor, found, 6 * PAGE_BYTES)
    assert found == second[PAGE_BYTES:]
    with pytest.raises(StateDamaged):
        read_at(descriptor, found, 6 * PAGE_BYTES + 1)
    os.close(descriptor)


def test_what_was_harmed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rank.state"
    write_state(path, [memory(5 * PAGE_BYTES)], {}, stop=threading.Event())
    record = read_record(path)
    with open(path, "r+b") as file:
        file.seek(3 * PAGE_BYTES + 7)
        file.write(b"\xff")
    assert f"at byte {2 * PAGE_BYTES}" in problem_with(path, record)
    os.truncate(path, 4 * PAGE_BYTES)
    with pytest.raises(StateDamaged, match="has 16384 bytes, 20480 were written"):
        read_record(path)
    record_path(path).write_text(json.dumps(sealed({**record, "format": 9, "size_bytes": 4 * PAGE_BYTES})))
    with pytest.raises(StateDamaged, match="format 9"):
        read_record(path)
    record_path(path).write_text("{")
    with pytest.raises(StateDamaged):
        read_record(path)
    record_path(path).write_text("[" * 100_000)
    with pytest.raises(StateDamaged):
        read_record(path)
    for chunks in ([[0, 4 * PAGE_BYTES + 1, "0"]], [[-1, 1, "0"]], [[0]], None, [[0.0, 1.0, "0"]]):
        record_path(path).write_text(
            json.dumps(sealed({**record, "size_bytes": 4 * PAGE_BYTES, "chunks": chunks}))
        )
        with pytest.raises(StateDamaged):
            read_record(path)


def test_a_record_has_a_checksum_of_itself() -> None:
    content = {"step": 3, "trained": ((0, 12), (20, 24)), "metrics": {"loss": 0.25}, "digest": None}
    written = json.dumps(sealed(content))
    assert not is_broken(json.loads(written))
    assert is_broken(json.loads(json.dumps(content))), "without its seal"
    for before, after in (("12", "16"), ("0.25", "0.75"), ("null", "true"), ('"step"', '"stop"')):
        assert is_broken(json.loads(written.replace(before, after, 1)))


def test_chunks_may_be_larger_than_this_process_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank.state"
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 16 * PAGE_BYTES)
    write_state(path, [memory(5 * PAGE_BYTES)], {}, stop=threading.Event())
    monkeypatch.setattr(state_files, "CHUNK_BYTES", PAGE_BYTES)
    assert problem_with(path, read_record(path)) == ""


@pytest.mark.parametrize("threads", [1, 3])
def test_one_that_is_stopped_or_fails_has_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    stop, path = threading.Event(), tmp_path / "rank.state"
    written, write_at = [], state_files._write_at

    def counted(descriptor: int, view: memoryview, offset: int) -> None:
        written.append(offset)
        if len(written) == 2:
            stop.set()
        write_at(descriptor, view, offset)

    monkeypatch.setattr(state_files, "_write_at", counted)
    with pytest.raises(WriteStopped):
        write_state(path, [memory(40 * PAGE_BYTES)], {}, stop=stop, threads=threads)
    assert len(written) < 20, "it ends after the chunks that are being written"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(state_files, "_write_at", full)
    with pytest.raises(OSError, match="no space"):
        write_state(path, [memory(PAGE_BYTES)], {}, stop=threading.Event(), threads=threads)
    assert not record_path(path).exists()


def test_a_copy_is_what_the_tensors_were_and_its_memory_is_taken_once() -> None:
    log: list[str] = []

    class Pinning(MachineMemory):
        def available(self) -> tuple[int, int]:
            return 1 << 40, 1 << 40

        def pin(self, memory: torch.Tensor) -> Callable[[], None]:
            log.append(f"pinned {memory.numel()}")
            return lambda: log.append("unpinned")

    buffer = HostBuffer(Pinning())
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.ones(5000, dtype=torch.bfloat16).t()]
    for _ in range(2):
        copied = buffer.copy(tensors)
        assert copied is not None
        view, offsets = copied
        assert offsets == [0, PAGE_BYTES, 2 * PAGE_BYTES]
        assert bytes(view[:24]) == tensors[0].numpy().tobytes()
    tensors[0].zero_()
    assert bytes(view[4:8]) == torch.tensor(1.0).numpy().tobytes(), "it is a copy"
    assert log == [f"pinned {5 * PAGE_BYTES}"]
    buffer.copy([torch.zeros(PAGE_BYTES)] * 2)
    assert log == [f"pinned {5 * PAGE_BYTES}", "unpinned", f"pinned {8 * PAGE_BYTES}"]
    buffer.close()
    buffer.close()
    assert log[-1] == "unpinned"
    assert len(log) == 4


def test_without_room_there_is_no_copy_and_the_reason_is_told() -> None:
    class Small(MachineMemory):
        def available(self) -> tuple[int, int]:
            return 1000, 10000

    buffer = HostBuffer(Small())
    assert buffer.copy([torch.zeros(10)]) is None
    assert "less than 10% of the machine's memory" in buffer.trouble
