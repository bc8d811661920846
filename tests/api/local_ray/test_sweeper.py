"""What a killed driver leaves is gone, and nothing else is.

The drivers here start no Ray, but what they leave is real.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.api.local_ray import sweeper
from gyre.process_identity import ProcessIdentity
from gyre.weights import owned_dirs
from tests.waits import GENEROUS_S

DRIVER = """
import os, subprocess, sys
from pathlib import Path
from gyre.api.local_ray.lean_start import Sweeper
folder = Path(sys.argv[1])
owner = '''
import os, sys, time
from pathlib import Path
from gyre.weights.owned_dirs import OwnedDir, default_root
owned = OwnedDir(default_root(), sys.argv[1])
print(os.getpid(), owned.path, flush=True)
time.sleep(999)
'''
made = Sweeper(folder)
session = folder / f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
session.mkdir()
(session / "file").touch()
with made.marked():
    command = [sys.executable, "-c", owner, str(session)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
line = child.stdout.readline().decode().strip()
unmarked = subprocess.Popen(["sleep", "999"], start_new_session=True)
made.note(unmarked.pid)
print(os.getpid(), made.pid, line, session, unmarked.pid, sep="|", flush=True)
sys.stdin.readline()
for each in (child, unmarked):
    each.kill()
    each.wait()
made.close()
"""


class Driver:
    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        pid, sweeping, line, session, unmarked = self.process.stdout.readline().decode().strip().split("|")
        child, weights = line.split(" ", 1)
        self.sweeper, self.child = identity(int(sweeping)), identity(int(child))
        self.unmarked = identity(int(unmarked))
        self.weights, self.session = Path(weights), Path(session)
        self.record = Path(sweeper.record_path(str(folder), identity(int(pid))))

    def what_is_left(self) -> list[object]:
        paths = [path for path in (self.weights, self.session, self.record) if path.exists()]
        return [*paths, *(each for each in self._processes() if each.is_alive())]

    def _processes(self) -> tuple[ProcessIdentity, ...]:
        return (self.child, self.unmarked, self.sweeper)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in self._processes():
            each.signal(signal.SIGKILL)
        shutil.rmtree(self.weights, ignore_errors=True)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def identity(pid: int) -> ProcessIdentity:
    found = ProcessIdentity.of(pid)
    assert found is not None
    return found


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[], Driver]]:
    drivers: list[Driver] = []

    def start() -> Driver:
        drivers.append(Driver(tmp_path))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def await_nothing_left(driver: Driver) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while left := driver.what_is_left():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_the_marks_have_the_same_names() -> None:
    assert (owned_dirs.DRIVER_VARIABLE, owned_dirs.DRIVER_FILE) == (sweeper.MARK, sweeper.OWNER_FILE)


def test_a_killed_driver_leaves_nothing_and_the_one_beside_it_keeps_all(begin: Callable[[], Driver]) -> None:
    killed, beside = begin(), begin()
    killed.process.kill()
    killed.process.wait()
    await_nothing_left(killed)
    assert len(beside.what_is_left()) == 6


def test_after_the_sweeper_was_killed_too_the_next_command_sweeps(
    begin: Callable[[], Driver], tmp_path: Path
) -> None:
    killed, beside = begin(), begin()
    killed.sweeper.signal(signal.SIGKILL)
    killed.process.kill()
    killed.process.wait()
    assert {killed.weights, killed.session, killed.record} <= set(killed.what_is_left())
    assert [driver.pid for driver in sweeper.sweep_left(str(tmp_path))] == [killed.process.pid]
    await_nothing_left(killed)
    assert len(beside.what_is_left()) == 6


def test_a_driver_that_ends_in_order_leaves_no_sweeper(begin: Callable[[], Driver]) -> None:
    driver = begin()
    assert driver.process.stdin is not None
    driver.process.stdin.write(b"\n")
    driver.process.stdin.flush()
    assert driver.process.wait(GENEROUS_S) == 0
    assert not driver.record.exists()
    assert not driver.sweeper.is_alive()


def test_weights_that_a_living_process_holds_stay(tmp_path: Path, begin: Callable[[], Driver]) -> None:
    driver = begin()
    sweeper._remove_weights(identity(driver.process.pid))
    assert driver.weights.is_dir()


def test_weights_whose_lock_outlives_their_process_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets go of a dead process's locks a moment after the process is seen to have ended."""
    monkeypatch.setattr(sweeper, "_SHARED", str(tmp_path))
    dead = ProcessIdentity(2**22 + 1, 1, ProcessIdentity.own().boot)
    weights = tmp_path / "gyre-weights-0123"
    weights.mkdir(mode=0o700)
    (weights / sweeper.OWNER_FILE).write_text(str(dead))
    lock = os.open(weights, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    looks: list[float] = []

    def let_go(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            os.close(lock)

    monkeypatch.setattr(sweeper.time, "sleep", let_go)
    sweeper.sweep(str(tmp_path), dead)
    assert not weights.exists()
    assert len(looks) == 2


def test_the_sweeper_is_small(begin: Callable[[], Driver]) -> None:
    status = Path(f"/proc/{begin().sweeper.pid}/status").read_text()
    resident_kib = int(status.split("VmRSS:")[1].split()[0])
    assert resident_kib < 20 * 1024
