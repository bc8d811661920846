"""A disk that fills and empties under the real master, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre.config import FailoverSpec
from gyre.failover import JobPhase, Reason
from gyre.failover.events import DiskFilled, DiskHasRoom
from gyre.master.disk_watch import SAID_HOLD_S, DiskWatch
from gyre.workloads.vertex.disk_room import DiskLook, DiskRoom, can_write, rooms_of
from tests.machine import fill, small_disk
from tests.master.lives import Job

MIB = 2**20


def disk(available_mib: float, *, total_mib: int = 10_000, where: str = "/d", name: str = "m/1") -> DiskRoom:
    return DiskRoom(where, name, int(available_mib * MIB), total_mib * MIB)


def test_nothing_is_started_and_nothing_charged_while_a_disk_is_full(make_job: Callable[..., Job]) -> None:
    """Five minutes, in which processes die that have nothing to do with it."""
    job = make_job(steps=3, step_s=30.0)
    seen: list[Any] = []
    job.world.at(20.0, lambda: setattr(job.world, "disks", (disk(3),)))
    for at_s, vertex in ((23.0, "rollout-0"), (30.0, "reward-0"), (40.0, "actor-1"), (50.0, "trainer-0")):
        job.world.at(at_s, job.world.kill, vertex)

    def look(life: Any) -> None:
        seen.append((len(job.world.spawned), job.state, life.master.view()))

    job.world.at(300.0, lambda: setattr(job.world, "disks", (disk(900),)))
    job.life().at(60.0, look).at(290.0, look).run()
    (begun, state, view), (later, _, _) = seen
    assert begun == later, "nothing was started"
    assert (state.job.phase, state.job.reason) == (JobPhase.RECOVERING, Reason.DISK_FULL)
    assert view["job"]["reason"] == "disk_full"
    (full,) = view["disks"]
    assert (full["where"], full["required_bytes"], full["available_bytes"]) == ("/d", 64 * MIB, 3 * MIB)
    assert job.phase is JobPhase.SUCCEEDED
    assert not job.state.uses
    assert job.state.job.reason is Reason.FINISHED


def test_a_master_that_dies_meanwhile_changes_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=20, step_s=5.0)
    job.world.at(10.0, lambda: setattr(job.world, "disks", (disk(3),)))
    job.world.at(13.0, job.world.kill, "rollout-0")
    job.life().at(30.0, lambda life: life.die()).run()
    assert job.state.job.reason is Reason.DISK_FULL
    job.world.at(60.0, lambda: setattr(job.world, "disks", (disk(900),)))
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert not job.state.uses


# -- the watch --------------------------------------------------------------------------------------


class Watched:
    def __init__(self, look: DiskLook | None = None) -> None:
        self.now = 0.0
        self.full: dict[str, dict[str, Any]] = {}
        self.watch = DiskWatch(FailoverSpec(), look or DiskLook())

    def news(self, *rooms: DiskRoom, node: str = "n0") -> list[DiskFilled | DiskHasRoom]:
        found = asyncio.run(self.watch.news({"a-0": (node, rooms)}, self.full, self.now))
        for one in found:
            key = f"{one.node}:{one.where}"
            if isinstance(one, DiskFilled):
                self.full[key] = {"where": one.where, "node": one.node, "since": self.now, "said": False}
            else:
                del self.full[key]
        return found


@pytest.mark.parametrize(
    ("total_mib", "full_mib", "between_mib", "enough_mib"),
    [(10_000, 31, 40, 64), (64, 7, 12, 16), (8, 0.5, 1.5, 2)],
)
def test_full_and_room_again_are_apart(
    total_mib: int, full_mib: float, between_mib: float, enough_mib: float
) -> None:
    watched = Watched()
    room = lambda mib: disk(mib, total_mib=total_mib)  # noqa: E731
    assert watched.news(room(between_mib)) == []
    assert [type(one) for one in watched.news(room(full_mib))] == [DiskFilled]
    assert watched.news(room(full_mib)) == []
    assert watched.news(room(between_mib)) == []
    assert [type(one) for one in watched.news(room(enough_mib))] == [DiskHasRoom]


def test_shared_memory_may_be_nearly_full() -> None:
    watched = Watched()
    assert watched.news(disk(2, total_mib=64, where="/dev/shm")) == []
    assert len(watched.news(disk(0.5, total_mib=64, where="/dev/shm"))) == 1


def test_one_disk_that_several_see_is_one() -> None:
    watched = Watched()
    assert len(watched.news(disk(1), disk(1, where="/d/logs"), disk(1, name="m/2", where="/e"))) == 2


def test_a_failed_write_is_believed_until_one_succeeds() -> None:
    with small_disk(8 << 10) as disk:
        folder = disk.path
        watched = Watched(DiskLook([folder]))
        watched.full["n0:x"] = {"where": "x", "node": "n0", "since": 0.0, "said": True}
        fill(folder / "ballast", leave_bytes=MIB // 2)
        assert watched.news() == []
        watched.now = SAID_HOLD_S
        assert watched.news() == []
        (folder / "ballast").unlink()
        assert watched.news() == [DiskHasRoom("x", 0, "n0")]
        assert [one.name for one in folder.iterdir()] == []


def test_a_look_at_a_real_disk(tmp_path: Path) -> None:
    with small_disk(8 << 10) as disk:
        folder = disk.path
        inner = folder / "a"
        inner.mkdir()
        (room,) = rooms_of([folder / "none", inner, folder])
        assert (room.where, room.total_bytes) == (str(inner), 8 * MIB)
        assert can_write(folder, MIB)
        fill(folder / "ballast")
        assert rooms_of([folder])[0].available_bytes == 0
        assert not can_write(folder, MIB)
