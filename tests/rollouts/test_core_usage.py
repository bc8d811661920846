"""The share of the cores in use, from what the system counts."""

from __future__ import annotations

import os
from pathlib import Path

from gyre.rollouts.core_usage import CoreUsage
from gyre.testing.clock import VirtualClock


def _count(root: Path, *, used: int, idle: int, quota: str = "", used_s: float = 0.0) -> None:
    """Ticks of each core of this process, and what a container of that quota has used."""
    cores = sorted(os.sched_getaffinity(0))
    lines = [f"cpu{core} {used} 0 0 {idle} 0 0 0 0 0 0" for core in [*cores, max(cores) + 1]]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "ctxt 1"]))
    if quota:
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.max").write_text(quota)
        (group / "cpu.stat").write_text(f"usage_usec {int(used_s * 1e6)}\nuser_usec 1\n")


def test_the_share_is_that_of_the_time_since_the_last_look(tmp_path: Path) -> None:
    clock = VirtualClock()
    _count(tmp_path, used=1000, idle=1000)
    cores = CoreUsage(root=tmp_path, clock=clock)
    assert cores.look() is None
    clock.advance(2.0)
    _count(tmp_path, used=1150, idle=1050)
    assert cores.look() == 0.75
    clock.advance(0.5)
    _count(tmp_path, used=1150, idle=1100)
    assert cores.look() == 0.75  # less than a second
    clock.advance(1.5)
    assert cores.look() == 0.0


def test_a_container_s_quota_counts_as_all_that_there_is(tmp_path: Path) -> None:
    clock = VirtualClock()
    _count(tmp_path, used=0, idle=1000, quota="200000 100000", used_s=10.0)
    cores = CoreUsage(root=tmp_path, clock=clock)
    clock.advance(10.0)
    _count(tmp_path, used=100, idle=1900, quota="200000 100000", used_s=29.0)
    assert cores.look() == 0.95


def test_where_the_system_does_not_say_nothing_is_made_up(tmp_path: Path) -> None:
    clock = VirtualClock()
    cores = CoreUsage(root=tmp_path, clock=clock)
    clock.advance(5.0)
    assert cores.look() is None
