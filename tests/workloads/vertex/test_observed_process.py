"""What is seen from outside of a process that tells nothing itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from gyre.workloads.vertex.observed_process import describe_process
from tests.waits import GENEROUS_S

IN_C = """
import ctypes
def stuck_in_c():
    print("now", flush=True)
    ctypes.PyDLL(None).sleep(1000)
stuck_in_c()
"""
"""It keeps the interpreter's lock: no thread of its own could tell where it is."""


@pytest.fixture
def stuck() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", IN_C], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    yield process.pid
    process.kill()
    process.wait(GENEROUS_S)
    process.stdout.close()


def test_one_that_is_stuck_in_c_shows_where_in_python_and_in_c(stuck: int) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while "sleep" not in (told := describe_process(stuck, 20.0)).partition("stuck_in_c")[0]:
        assert time.monotonic() < deadline, told
    assert "stuck_in_c" in told
    assert "S (sleeping)" in told


def test_one_that_is_stopped_is_not_waited_for(stuck: int) -> None:
    os.kill(stuck, signal.SIGSTOP)
    while psutil.Process(stuck).status() != psutil.STATUS_STOPPED:  # the kernel does it soon
        time.sleep(0.01)
    begun = time.monotonic()
    told = describe_process(stuck, GENEROUS_S)
    assert time.monotonic() - begun < GENEROUS_S / 2
    assert "T (stopped)" in told
    assert "stuck_in_c" in told


def test_one_that_is_gone_is_told_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait(GENEROUS_S)
    assert describe_process(process.pid) == f"process {process.pid}: gone"
