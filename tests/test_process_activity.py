"""What the kernel says of a process that answers nobody: it works, is kept from working, hangs, is stopped or dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from gyre.process_activity import Activity, ProcessLife, activity_of
from tests.machine import control_group
from tests.waits import GENEROUS_S

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(1000)"
IN_C = "import ctypes; ctypes.PyDLL(None).sleep(1000)"
"""No thread of Python's runs while this one has the interpreter's lock; the kernel sees it asleep."""
COUNTS_IN_C = "import re; re.match('(a*)*b', 'a' * 64)"
"""So it is here; and the kernel sees it work."""

LOADS = f"""
import ctypes, mmap
c = ctypes.PyDLL(None)
while True:
    with mmap.mmap(-1, {1 << 30}) as memory:
        c.memset(ctypes.byref(ctypes.c_char.from_buffer(memory)), 1, ctypes.c_size_t({1 << 30}))
"""
"""A gigabyte is made and filled in a call that keeps the interpreter's lock."""

HELD_BYTES = 256 << 20

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
    found = activity_of(pid, 0.5)
    assert found is not None
    return found.waited


def life_of(pid: int) -> ProcessLife | None:
    found = activity_of(pid, 0.2)
    return None if found is None else found.life


@pytest.mark.parametrize(
    ("code", "stop", "life"),
    [
        (SLEEP, False, ProcessLife.HUNG),
        (IN_C, False, ProcessLife.HUNG),
        (SPIN, True, ProcessLife.STOPPED),
        (SPIN, False, ProcessLife.BUSY),
        (COUNTS_IN_C, False, ProcessLife.BUSY),
        (LOADS, False, ProcessLife.BUSY),
    ],
    ids=["sleeps", "sleeps in C", "stopped", "works", "works in C", "loads"],
)
def test_what_it_does_is_told_without_it(start: Start, code: str, stop: bool, life: ProcessLife) -> None:
    pid = start(code)
    if stop:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: life_of(pid) is life)
    assert life_of(pid) is life


def test_one_that_the_machine_lets_have_no_memory_is_starved(start: Start) -> None:
    """It stands in the kernel, in the middle of filling memory; and works again when it is let."""
    with control_group() as group:
        pid = start(LOADS)
        group.take(pid)
        group.hold(HELD_BYTES)
        until(lambda: (found := activity_of(pid, 0.2)) is not None and found.ran < 0.01)
        held = activity_of(pid, 0.5)
        assert held is not None
        assert (held.life, held.is_starved) == (ProcessLife.BUSY, True)
        group.release()
        until(lambda: (found := activity_of(pid, 0.2)) is not None and found.ran > 0.05)


@pytest.mark.parametrize(
    ("activity", "life", "starved"),
    [
        (Activity("R", ran=0.1, waited=0.9), ProcessLife.BUSY, True),
        (Activity("RS", ran=0.2, waited=0.5), ProcessLife.BUSY, True),
        (Activity("DS", ran=0.0, waited=0.0), ProcessLife.BUSY, True),
        (Activity("S", ran=0.0, waited=0.0, faults=500.0), ProcessLife.BUSY, True),
        (Activity("RS", ran=1.0, waited=0.0), ProcessLife.BUSY, False),
        (Activity("S", ran=0.03, waited=0.0), ProcessLife.HUNG, False),
        (Activity("T", ran=0.0, waited=0.0), ProcessLife.STOPPED, False),
        (Activity("TZ", ran=0.0, waited=0.0), ProcessLife.STOPPED, False),
        (Activity("Z", ran=0.0, waited=0.0), ProcessLife.DEAD, False),
    ],
    ids=["starved", "some starved", "disk", "swaps", "works", "sleeps", "stopped", "a thread ended", "dead"],
)
def test_the_words(activity: Activity, life: ProcessLife, starved: bool) -> None:
    assert (activity.life, activity.is_starved) == (life, starved)


def test_nothing_is_known_of_a_process_that_is_gone(start: Start) -> None:
    pid = start("pass")
    until(lambda: _is_gone(pid))
    assert activity_of(pid, 0.01) is None


def _is_gone(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid
