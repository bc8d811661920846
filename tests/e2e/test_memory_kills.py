"""A vertex that the kernel kills because its control group has no memory left is told so, and is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gyre.api import RLJobBuilder
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.machine import ControlGroup, control_group

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

MODULE = "tests.e2e.workloads"

REPORTED_S = 3.0
"""Several times as long as from one report of a vertex to the next: its last one is of its new group."""


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    with control_group() as made:
        yield made


def test_whom_the_kernel_kills_for_its_memory_is_told_so_and_replaced(
    shared: Shared, group: ControlGroup
) -> None:
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
