"""What a rank leaves in its machine's memory: whole or not there, whoever is killed at whatever moment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.workloads.gang import host_memory, machine_memory
from gyre.workloads.gang.host_memory import HostMemory, HostMemoryDamaged, NoHostMemory, SlotRecord
from gyre.workloads.gang.machine_memory import MachineMemory
from tests.rank_pool import RankPool
from tests.workloads.host_memory_work import come_and_go


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("weight", torch.full((7, 5), value, dtype=torch.bfloat16)),
        ("step", torch.tensor(value)),
        ("random", torch.full((300,), int(value), dtype=torch.uint8)),
        ("none", torch.zeros(0)),
    ]


def saved(memory: HostMemory, *steps: int, lineage: str = "one") -> None:
    for step in steps:
        memory.save(tensors(step), lineage=lineage, step=step, book={"step": step})
    memory.settle()


def is_right(memory: HostMemory, record: SlotRecord) -> bool:
    """Whether the slot's bytes match its record."""
    found = [(span.name, torch.zeros(span.shape, dtype=getattr(torch, span.dtype))) for span in record.spans]
    return memory.load(record, found)


def test_the_next_one_in_its_place_finds_the_last_two(tmp_path: Path) -> None:
    first = HostMemory("job", 3, root=tmp_path)
    saved(first, 1, 2, 3)
    first.close(keep=True)
    second = HostMemory("job", 3, root=tmp_path)
    assert [(record.step, record.lineage, record.book) for record in second.records()] == [
        (3, "one", {"step": 3}),
        (2, "one", {"step": 2}),
    ]
    for record in second.records():
        found = tensors(0)
        assert second.load(record, found)
        for (_, mine), (_, wanted) in zip(found, tensors(record.step), strict=True):
            assert torch.equal(mine, wanted)
    second.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_what_was_gone_on_from_is_kept_while_the_next_is_written(tmp_path: Path) -> None:
    """The older of two states was restored; a newer one of another life must not outlast it."""
    memory = HostMemory("job", 0, root=tmp_path)
    saved(memory, 4, 5)
    memory.load(memory.records()[1], tensors(0))
    saved(memory, 5, lineage="two")
    assert [(record.step, record.lineage) for record in memory.records()] == [(5, "two"), (4, "one")]
    memory.close(keep=False)


KILLED_IN_A_COPY = """
import os, sys, time
from pathlib import Path
import torch
from gyre.workloads.gang.host_memory import HostMemory
from gyre.workloads.gang.machine_memory import MachineMemory

class Stuck(MachineMemory):
    def copy(self, into, of):
        into.copy_(of)
        if float(of.view(torch.float32)[0]) == 3:
            os.write(1, b"half way\\n")  # at once: threads do this beside each other
            time.sleep(600)

memory = HostMemory("job", 0, root=Path(sys.argv[1]), memory=Stuck())
for step in (1, 2, 3):
    memory.save(
        [(name, torch.full((200_000,), float(step))) for name in ("a", "b")],
        lineage="one", step=step, book={},
    )
memory.settle()
"""


def test_a_rank_killed_in_the_middle_of_a_copy_leaves_the_state_before(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_IN_A_COPY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert said == "half way\n"
    memory = HostMemory("job", 0, root=tmp_path)
    (record,) = memory.records()
    assert record.step == 2, "the third went over the first, and was not whole"
    found = [(name, torch.zeros(200_000)) for name in ("a", "b")]
    assert memory.load(record, found)
    assert all(bool((tensor == 2).all()) for _, tensor in found)
    memory.close(keep=False)


def test_a_flipped_bit_is_noticed_and_other_tensors_are_refused_untouched(tmp_path: Path) -> None:
    memory = HostMemory("job", 0, root=tmp_path)
    saved(memory, 1)
    (record,) = memory.records()
    with pytest.raises(HostMemoryDamaged, match="other tensors"):
        memory.load(record, [("weight", torch.zeros(3))])
    with open(memory.path / f"slot_{record.slot}.0", "r+b") as file:
        file.seek(8)
        file.write(b"\xff")
    assert not is_right(memory, record)
    memory.close(keep=False)


def test_a_place_is_one_processs_and_another_jobs_is_another(tmp_path: Path) -> None:
    memory = HostMemory("job", 0, root=tmp_path)
    with pytest.raises(NoHostMemory, match="another process holds"):
        HostMemory("job", 0, root=tmp_path, lock_within_s=0.0)
    saved(memory, 1)
    other = HostMemory("other job", 0, root=tmp_path)
    assert other.records() == []
    for each in (memory, other):
        each.close(keep=False)


def test_memory_that_the_machine_needs_is_not_taken(tmp_path: Path) -> None:
    class Small(MachineMemory):
        def available(self) -> tuple[int, int]:
            return 1000, 9000

    memory = HostMemory("job", 0, root=tmp_path, memory=Small())
    with pytest.raises(NoHostMemory, match="less than 10% of the machine's memory"):
        memory.make_room(tensors(1))
    assert sorted(path.name for path in memory.path.iterdir()) == ["lock"]
    memory.close(keep=False)


def test_a_container_has_what_its_groups_allow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, own = tmp_path / "mounted", tmp_path / "own"
    assert machine_memory.allowed(own, mounted) == [], "another system"
    own.write_text("4:memory:/elsewhere\n0::/pod/box\n")
    for path, limit in (("", None), ("pod", "5000"), ("pod/box", "max")):
        folder = mounted / path
        folder.mkdir()
        (folder / "memory.current").write_text("1500\n")
        (folder / "memory.stat").write_text("anon 900\ninactive_file 500\n")
        if limit is not None:
            (folder / "memory.max").write_text(f"{limit}\n")
    assert machine_memory.allowed(own, mounted) == [(4000, 5000)]
    monkeypatch.setattr(machine_memory, "allowed", lambda: [(4000, 5000), (6000, 7000)])
    assert machine_memory.available_memory() == (4000, 5000)
    monkeypatch.setattr(machine_memory, "allowed", list)
    assert machine_memory.available_memory()[1] == machine_memory.psutil.virtual_memory().total


def test_so_does_one_of_the_first_version_of_groups(tmp_path: Path) -> None:
    """As Docker mounts them: the container's own group is all that it sees, whatever its path is outside."""
    mounted, own = tmp_path / "mounted", tmp_path / "own"
    own.write_text(
        "9:cpu,cpuacct:/docker/a\n5:memory:/docker/a\n1:name=systemd:/docker/a\n0::/system.slice\n"
    )
    folder = mounted / "memory"
    folder.mkdir(parents=True)
    for name, value in (("limit_in_bytes", 7000), ("usage_in_bytes", 2000)):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 600\n")
    assert machine_memory.allowed(own, mounted) == [(5600, 7000)]
    inner = folder / "docker" / "a"
    inner.mkdir(parents=True)
    for name, value in (("limit_in_bytes", 2**63 - 4096), ("usage_in_bytes", 900)):
        (inner / f"memory.{name}").write_text(f"{value}\n")
    (inner / "memory.stat").write_text("total_inactive_file 0\n")
    assert machine_memory.allowed(own, mounted) == [(5600, 7000)], "that one has no limit"


def test_what_is_pinned_are_a_few_buffers_and_no_state_is_mapped(tmp_path: Path) -> None:
    pinned: dict[int, int] = {}

    class Pinning(MachineMemory):
        def pin(self, memory: torch.Tensor) -> Callable[[], None]:
            address = memory.data_ptr()
            pinned[address] = memory.numel()
            return lambda: pinned.pop(address) and None

    memory = HostMemory("job", 0, root=tmp_path, memory=Pinning())
    memory.make_room(tensors(1))
    assert not pinned, "nothing is copied yet"
    saved(memory, 1, 2, 3)
    memory.load(memory.records()[0], tensors(0))
    assert 0 < len(pinned) <= host_memory.COPIERS
    assert set(pinned.values()) == {host_memory.PIECE_BYTES}
    with open("/proc/self/maps") as maps:
        assert "slot_" not in maps.read()
    memory.close(keep=True)
    memory.close(keep=True)
    assert not pinned
    second = HostMemory("job", 0, root=tmp_path)
    second.close(keep=False)


def test_a_state_is_copied_beside_the_training_and_settled_before_it_changes(tmp_path: Path) -> None:
    go_on, stays = threading.Event(), torch.full((5,), 7.0)

    class Slow(MachineMemory):
        def copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
            assert go_on.wait(60)
            into.copy_(of)

    memory = HostMemory("job", 0, root=tmp_path, memory=Slow())
    memory.save([("weight", stays)], lineage="one", step=1, book={})
    assert not list(memory.path.glob("*.json")), "it returns before anything is copied"
    go_on.set()
    memory.settle()
    stays.zero_()
    (record,) = memory.records()
    found = torch.zeros(5)
    memory.load(record, [("weight", found)])
    assert found.tolist() == [7.0] * 5
    memory.close(keep=False)


def test_whoever_reads_the_tensors_while_a_state_comes_back_is_not_told_that_they_changed(
    tmp_path: Path,
) -> None:
    """Autograd refuses a gradient by what was changed since, and a pass beside a restore wants none that means
    anything."""
    weight = torch.nn.Parameter(torch.ones(5))
    memory = HostMemory("job", 0, root=tmp_path)
    memory.save([("weight", weight)], lineage="one", step=1, book={})
    (record,) = memory.records()
    read = weight.square()
    assert memory.load(record, [("weight", weight)], beside=weight.square)
    read.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.tolist() == [1.0] * 5
    with pytest.raises(ZeroDivisionError):
        memory.load(record, [("weight", weight)], beside=lambda: 1 // 0 and None)
    memory.close(keep=False)


def test_a_state_of_many_pieces_comes_back_and_each_of_its_bytes_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 1 << 10)
    named = [("a", torch.randn(3000)), ("b", torch.randn(17).to(torch.bfloat16)), ("c", torch.randn(40, 50))]
    memory = HostMemory("job", 0, root=tmp_path)
    memory.save(named, lineage="one", step=1, book={})
    (record,) = memory.records()
    found = [(name, torch.zeros_like(one)) for name, one in named]
    memory.load(record, found)
    assert all(torch.equal(mine, wanted) for (_, mine), (_, wanted) in zip(found, named, strict=True))
    files = sorted(memory.path.glob(f"slot_{record.slot}.[0-9]*"))
    assert len(files) == host_memory.COPIERS, "they are written beside each other"
    for span in record.spans:
        for at in (span.offset, span.offset + span.size_bytes - 1):
            number, offset = host_memory._place(at)
            path = memory.path / f"slot_{record.slot}.{number}"
            whole = path.read_bytes()
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
            assert not is_right(memory, record)
            path.write_bytes(whole)
    assert is_right(memory, record)
    held = memory.hold(1)
    assert held is not None
    _, size = host_memory.plan(named)
    assert b"".join(held[0:size])[: named[0][1].nbytes] == named[0][1].numpy().tobytes()
    assert b"".join(held[1000:3000]) == b"".join(held[0:size])[1000:3000]
    memory.release()
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[: len(whole) // 2])
    assert not is_right(memory, record), "it ends too early"
    assert memory.records() == []
    files[1].unlink()
    assert not is_right(memory, record), "a file is gone"
    memory.close(keep=False)


def test_who_writes_to_the_disk_holds_the_slot_of_its_own_step_or_none(tmp_path: Path) -> None:
    memory = HostMemory("job", 0, root=tmp_path)
    saved(memory, 1)
    assert memory.hold(2) is None
    held = memory.hold(1)
    assert held is not None
    whole = bytes(held[0:100][0])
    saved(memory, 2, 3, 4)
    assert bytes(held[0:100][0]) == whole, "the other slot was written again and again"
    memory.release()
    del held
    memory.close(keep=False)


def test_a_full_file_system_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    memory = HostMemory("job", 0, root=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoHostMemory, match="no room"):
        memory.make_room(tensors(1))
    assert sorted(path.name for path in memory.path.iterdir()) == ["lock"]
    memory.close(keep=False)


def test_a_state_that_could_not_be_recorded_costs_its_own_slot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    memory = HostMemory("job", 0, root=tmp_path)
    saved(memory, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        saved(memory, 3)
    with pytest.raises(OSError, match="No space left"):
        saved(memory, 4)
    assert [record.step for record in memory.records()] == [2]
    saved(memory, 5)
    assert [record.step for record in memory.records()] == [5, 2]
    memory.close(keep=False)


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    HostMemory("job", 0, root=tmp_path).close(keep=True)
    (home,) = tmp_path.iterdir()
    home.chmod(0o777)
    with pytest.raises(NoHostMemory, match="not a private folder"):
        HostMemory("job", 0, root=tmp_path)


@pytest.fixture
def age(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = time.time()
    return lambda seconds: monkeypatch.setattr(host_memory.time, "time", lambda: now + seconds)


def test_what_a_job_left_behind_goes_when_nobody_has_held_it_for_long(
    tmp_path: Path, age: Callable[[float], None]
) -> None:
    left, held = HostMemory("left", 0, root=tmp_path), HostMemory("held", 0, root=tmp_path)
    saved(left, 1)
    left.close(keep=True)
    HostMemory("young", 0, root=tmp_path).close(keep=False)
    assert len(list(tmp_path.iterdir())) == 2, "its job may come back"
    age(host_memory.KEPT_S + 1)
    HostMemory("old", 0, root=tmp_path).close(keep=False)
    assert list(tmp_path.iterdir()) == [held.path.parent]
    held.close(keep=False)


def test_the_end_of_a_job_takes_what_dead_ranks_left_and_leaves_what_living_ones_hold(tmp_path: Path) -> None:
    first, dead, living = (HostMemory("job", rank, root=tmp_path) for rank in range(3))
    for each in (first, dead, living):
        saved(each, 1)
    dead.close(keep=True)
    first.close(keep=False)
    assert sorted(path.name for path in living.path.parent.glob("rank_*")) == ["rank_00002"]
    living.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_are_stuck_when_the_job_ends_remove_their_own_beside_the_call(tmp_path: Path) -> None:
    at_work, go_on = threading.Event(), threading.Event()

    class Stuck(MachineMemory):
        def copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
            at_work.set()
            assert go_on.wait(60)
            into.copy_(of)

    one, other = HostMemory("job", 0, root=tmp_path), HostMemory("job", 1, root=tmp_path, memory=Stuck())
    saved(one, 1)
    thread = threading.Thread(target=saved, args=(other, 1))
    thread.start()
    assert at_work.wait(60)
    other.unlink()
    assert [path.name for path in one.path.parent.glob("rank_*")] == ["rank_00000"]
    one.unlink()
    assert list(tmp_path.iterdir()) == []
    go_on.set()
    thread.join(60)
    assert not thread.is_alive(), "it was not torn from what it wrote"
    assert other.records() == []
    one.close(keep=False)
    other.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_come_and_go_at_the_same_time_do_not_meet(tmp_path: Path, ranks: RankPool) -> None:
    """Each removes what dead ranks left, and the folder after the last of them; none takes away another one's."""
    ranks.run(come_and_go, 3, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_was_taken_anew_while_another_rank_looked_at_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has opened the lock of a dead rank, whose successor takes the place anew before it is locked."""
    leaving, dead = HostMemory("job", 0, root=tmp_path), HostMemory("job", 1, root=tmp_path)
    dead.close(keep=True)
    taken: list[HostMemory] = []
    flock = host_memory.fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if not taken and os.path.samestat(os.fstat(descriptor), (dead.path / "lock").stat()):
            shutil.rmtree(dead.path)
            taken.append(dead)  # it is not late again
            taken[0] = HostMemory("job", 1, root=tmp_path)
        flock(descriptor, how)

    monkeypatch.setattr(host_memory.fcntl, "flock", late)
    leaving.close(keep=False)
    assert taken[0].path.exists(), "it is somebody's"
    saved(taken[0], 1)
    taken[0].close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_the_names_go_before_a_copy_is_waited_for(tmp_path: Path) -> None:
    """A process that is ended may not get the time to end a copy of many gigabytes."""
    there: list[bool] = []
    at_work = threading.Event()

    class Slow(MachineMemory):
        def copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
            at_work.set()
            until = time.monotonic() + 60
            while memory.path.exists() and time.monotonic() < until:
                time.sleep(0.01)
            there.append(memory.path.exists())

    memory = HostMemory("job", 0, root=tmp_path, memory=Slow())
    memory.save([("weight", torch.ones(5))], lineage="one", step=1, book={})
    assert at_work.wait(60)
    memory.close(keep=False)
    assert there == [False]
    successor = HostMemory("job", 0, root=tmp_path)
    memory.close(keep=False)
    assert successor.path.exists(), "it is not the first one's any more"
    successor.close(keep=False)
