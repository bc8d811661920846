"""A vertex that the kernel kills because its control group has no memory left is told so, and is replaced."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.api import RLJobBuilder
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(240)]

MODULE = "tests.e2e.workloads"

ONE, MANY = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
"""Where control groups of version 1 and 2 limit memory."""

REPORTED_S = 3.0
"""Several times as long as from one report of a vertex to the next: its last one is of its new group."""


class Group:
    """A control group of its own, without a limit at first."""

    def __init__(self, path: Path, limit: str) -> None:
        self._path = path
        self._limit = path / limit

    def take(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def starve(self) -> None:
        """Let it have no page more."""
        while True:
            used = self._path / "memory.usage_in_bytes"  # version 1 takes no limit below it
            try:
                self._limit.write_text(used.read_text() if used.exists() else "0")
                return
            except OSError as error:  # it has taken more meanwhile
                if error.errno != errno.EBUSY:
                    raise


@pytest.fixture
def group() -> Iterator[Group]:
    root, limit = (ONE, "memory.limit_in_bytes") if ONE.is_dir() else (MANY, "memory.max")
    path = root / f"gyre-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    if not (path / limit).exists():
        path.rmdir()
        pytest.skip(f"control groups do not limit memory here: {path / limit} is missing")
    yield Group(path, limit)
    path.rmdir()


def test_whom_the_kernel_kills_for_its_memory_is_told_so_and_replaced(shared: Shared, group: Group) -> None:
    handle = shared.submit(RLJobBuilder().trainer(MODULE, "Endless").rollout(MODULE, "Hungry"), "hungry")
    faults = ProcessFaults(handle)
    faults.reach_step(3)
    victim = faults.find("rollout-0")
    group.take(victim.pid)
    time.sleep(REPORTED_S)
    group.starve()
    faults.replaced(victim)
    handle.stop("enough")
    view = handle.wait(ENDS_WITHIN_S)
    handle.close()
    assert view["job"]["phase"] == "stopped"
    [incident] = view["incidents"]
    assert (incident["vertex"], incident["cause"]) == ("rollout-0", "out_of_memory")
    assert "of its control group for want of memory" in incident["evidence"]["error"]
