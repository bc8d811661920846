"""What the kernel says of a process: stopped, asleep, or kept from running by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from gyre.workloads.vertex.observed_process import cpu_activity
from tests.waits import GENEROUS_S

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(1000)"

Start = Callable[[str], int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes that share one CPU, and ends them."""
    processes: list[subprocess.Popen[bytes]] = []
    cpu = min(os.sched_getaffinity(0))

    def begin(code: str) -> int:
        processes.append(subprocess.Popen([sys.executable, "-c", code]))
        os.sched_setaffinity(processes[-1].pid, {cpu})
        return processes[-1].pid

    yield begin
    for process in processes:
        process.kill()
        process.wait(GENEROUS_S)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_beside_many_others_waits_for_a_cpu(start: Start) -> None:
    pids = [start(SPIN) for _ in range(4)]
    until(lambda: waited(pids[0]) > 0.3)


def waited(pid: int) -> float:
    found = cpu_activity(pid, 0.5)
    assert found is not None
    return found[2]


@pytest.mark.parametrize(("code", "stop", "state"), [(SLEEP, False, "S"), (SPIN, True, "T")])
def test_a_process_that_does_not_want_to_run_waits_for_none(
    start: Start, code: str, stop: bool, state: str
) -> None:
    pid = start(code)
    if stop:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: (cpu_activity(pid, 0.1) or "?")[0] == state)
    found = cpu_activity(pid, 0.2)
    assert found is not None
    assert (found[0], found[1]) == (state, 0.0)


def test_nothing_is_known_of_a_process_that_is_gone(start: Start) -> None:
    pid = start("pass")
    until(lambda: _is_gone(pid))
    assert cpu_activity(pid, 0.01) is None


def _is_gone(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid
