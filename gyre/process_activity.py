"""What a process does, by the kernel's word alone: its threads' states, the CPU time and the page faults of a moment.

It needs nothing of the process: neither that it answers nor that its interpreter is free. A call into C that keeps the
interpreter's lock (a tokenizer, a loader, a pickle of gigabytes) silences every thread of a process that is well.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

WORKING_SHARE = 0.2
"""CPUs that a process's threads use, on average, from which on it works. One that hangs uses far less: the threads of
Ray and of the collectives look around now and then."""

STARVED_SHARE = 0.3
"""CPUs that its threads wait for from which on the machine keeps it from working. One that hangs waits for none."""

FAULTS_A_S = 100.0
"""Page faults a second with something to read from which on it is being brought in from a disk."""


class ProcessLife(StrEnum):
    """What is found of a process that reports nothing."""

    BUSY = "busy"
    """It works, or would if the machine let it."""
    HUNG = "hung"
    """It could run, and does nothing."""
    STOPPED = "stopped"
    """By a signal, or a debugger."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process did for a moment."""

    states: str
    """The letters of its threads' states by proc(5), each once."""
    ran: float
    """CPUs that its threads used, on average."""
    waited: float
    """CPUs that they were ready to use and did not get."""
    faults: float = 0.0
    """Page faults a second for which something was read."""

    @property
    def life(self) -> ProcessLife:
        if not self.states.strip("ZX"):
            return ProcessLife.DEAD
        if not self.states.strip("TtZX"):
            return ProcessLife.STOPPED
        return ProcessLife.BUSY if self.is_starved or self.ran >= WORKING_SHARE else ProcessLife.HUNG

    @property
    def is_starved(self) -> bool:
        """Whether it lacks CPUs or memory, or a disk is waited for: the machine does not let it work."""
        return "D" in self.states or self.waited >= STARVED_SHARE or self.faults >= FAULTS_A_S


def activity_of(pid: int, over_s: float) -> Activity | None:
    """Look twice at a process of this machine, `over_s` apart. None if it is gone or the kernel does not tell."""
    began = time.monotonic()
    try:
        before, faults_before = _seconds_by_thread(pid), _faults(pid)
        time.sleep(over_s)
        after, faults_after = _seconds_by_thread(pid), _faults(pid)
        states = _states(pid)
    except (OSError, ValueError, IndexError):
        return None
    took_s = time.monotonic() - began
    both = before.keys() & after.keys()
    ran_s = sum(after[thread][0] - before[thread][0] for thread in both)
    waited_s = sum(after[thread][1] - before[thread][1] for thread in both)
    return Activity(states, ran_s / took_s, waited_s / took_s, (faults_after - faults_before) / took_s)


def _seconds_by_thread(pid: int) -> dict[str, tuple[float, float]]:
    """The seconds that each thread ran, and those that it was ready to run and had no CPU."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns, waited_ns, _ = (thread / "schedstat").read_text().split()
        except FileNotFoundError:  # it has ended meanwhile
            continue
        found[thread.name] = (int(ran_ns) * 1e-9, int(waited_ns) * 1e-9)
    return found


def _states(pid: int) -> str:
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found.add(_fields(thread / "stat")[0])
    return "".join(sorted(found))


def _faults(pid: int) -> int:
    return int(_fields(Path(f"/proc/{pid}/stat"))[9])


def _fields(stat: Path) -> list[str]:
    """What stands behind the name, which is in brackets and may hold any character."""
    return stat.read_text().rpartition(")")[2].split()
