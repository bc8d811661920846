"""A master that hangs is ended once, by a guard on its own machine, and by no other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from gyre.process_activity import Activity
from gyre.process_identity import ProcessIdentity
from gyre.workloads.vertex.master_watchdog import MasterProcesses, MasterWatchdog

MASTER = ProcessIdentity(41, 7, "this boot")

Make = Callable[..., MasterWatchdog]


class Masters(MasterProcesses):
    """Of which one is `alive`, until it is `killed`, and does this."""

    def __init__(
        self, killed: list[int], *, alive: bool = True, does: Activity | None = None, dies: bool = False
    ) -> None:
        self.killed, self.alive, self.does, self.dies = killed, alive, does, dies

    def is_alive(self, master: ProcessIdentity) -> bool:
        return self.alive

    def activity(self, pid: int) -> Activity | None:
        return self.does

    def end(self, master: ProcessIdentity) -> bool:
        self.killed.append(master.pid)
        self.alive = not self.dies
        return True


HANGS = Activity("S", 0.0, 0.0)


class Unseen(MasterProcesses):
    """The machine's own, of which the kernel does not tell what they do."""

    def activity(self, pid: int) -> Activity | None:
        return None


@pytest.fixture
def killed() -> list[int]:
    return []


@pytest.fixture
def make(killed: list[int]) -> Make:
    def guard(
        *,
        master: ProcessIdentity | None = MASTER,
        is_alive: bool = True,
        activity: Activity | None = HANGS,
    ) -> MasterWatchdog:
        made = MasterWatchdog(10.0, Masters(killed, alive=is_alive, does=activity))
        made.master = master
        return made

    return guard


def test_a_master_within_its_time_is_left_alone(make: Make, killed: list[int]) -> None:
    assert make().look(9.9) is None
    assert killed == []


def test_a_silent_master_is_ended_once_and_its_state_is_told(make: Make, killed: list[int]) -> None:
    guard = make()
    found = guard.look(10.0)
    assert found is not None
    assert (found["pid"], found["silent_s"]) == (41, 10.0)
    assert "process 41" in str(found["stack"])
    assert guard.look(11.0) is None, "its successor has not been heard of yet and is not its predecessor"
    assert killed == [41]


def test_of_guards_that_look_at_the_same_time_only_the_one_that_ended_the_master_tells() -> None:
    """The evidence of another would be of a process that is gone, and would replace what the first saw."""
    tell: list[str] = []

    class SecondIsQuicker(Masters):
        def describe(self, pid: int) -> str:
            if not tell:
                tell.append("first")
                found = guards[1].look(10.0)
                assert found is not None
                assert found["stack"] == "State T (stopped)"
            return "State T (stopped)"

    masters = SecondIsQuicker([], does=Activity("T", 0.0, 0.0), dies=True)
    guards = [MasterWatchdog(10.0, masters) for _ in range(2)]
    for guard in guards:
        guard.master = MASTER
    assert guards[0].look(10.0) is None
    assert masters.killed == [41]


def test_a_successor_that_hangs_too_is_ended_too(make: Make, killed: list[int]) -> None:
    guard = make()
    guard.look(10.0)
    guard.master = ProcessIdentity(42, 8, "this boot")
    assert guard.look(0.1) is None
    assert guard.look(12.0) is not None
    assert killed == [41, 42]


@pytest.mark.parametrize(
    "other", [{"master": None}, {"is_alive": False}], ids=["never heard of one", "it has ended"]
)
def test_what_is_not_this_machines_master_is_not_touched(
    make: Make, killed: list[int], other: dict[str, object]
) -> None:
    assert make(**other).look(100.0) is None
    assert killed == []


@pytest.mark.parametrize(
    "change",
    [{"started": 1}, {"boot": "another machine"}],
    ids=["the pid was given again", "on another machine"],
)
def test_another_process_of_the_masters_pid_lives_on(change: dict[str, object]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        found = ProcessIdentity.of(other.pid)
        assert found is not None
        guard = MasterWatchdog(10.0, Unseen())
        guard.master = found._replace(**change)  # type: ignore[arg-type]
        assert guard.look(100.0) is None
        assert other.poll() is None
        guard.master = found
        assert guard.look(100.0) is not None
        assert other.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("activity", "ended_after_s"),
    [
        pytest.param(Activity("S", 0.0, 0.0), 10.0, id="it hangs"),
        pytest.param(Activity("T", 0.0, 0.0), 10.0, id="it is stopped"),
        pytest.param(Activity("R", 1.0, 0.0), 10.0, id="it runs in circles"),
        pytest.param(None, 10.0, id="the kernel does not tell"),
        pytest.param(Activity("R", 0.1, 0.9), 30.0, id="its machine is busy"),
        pytest.param(Activity("S", 0.1, 0.3), 30.0, id="its machine is rather busy"),
        pytest.param(Activity("D", 0.0, 0.0), 30.0, id="it waits for a disk"),
    ],
)
def test_a_master_that_its_machine_does_not_let_run_has_more_time(
    make: Make, killed: list[int], activity: Activity | None, ended_after_s: float
) -> None:
    guard = make(activity=activity)
    assert guard.look(ended_after_s - 0.1) is None
    assert killed == []
    assert guard.look(ended_after_s) is not None
    assert killed == [41]


def test_a_guard_whose_signal_comes_too_late_tells_nothing() -> None:
    class Gone(Masters):
        def end(self, master: ProcessIdentity) -> bool:
            return False

    guard = MasterWatchdog(10.0, Gone([]))
    guard.master = MASTER
    assert guard.look(10.0) is None
