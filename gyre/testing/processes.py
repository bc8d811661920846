"""Faults in real processes: kill, stop and watch the vertices and the master of a running job.

Works on processes of this machine only, by the pids that the job itself reports. For tests and benchmarks of
jobs on a local Ray cluster.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gyre.process_identity import ProcessIdentity

View = dict[str, Any]

T = TypeVar("T")


class Viewable(Protocol):
    """What a job handle is to this module."""

    def status(self) -> View: ...


@dataclass(frozen=True, slots=True)
class Victim:
    """One incarnation of a vertex, or `master`."""

    name: str
    incarnation: int
    pid: int


class ProcessFaults:
    """Kills and stops what a job runs on. Waits have deadlines, and raise TimeoutError that says what was seen."""

    def __init__(self, job: Viewable, *, look_s: float = 0.1) -> None:
        """`look_s` is between two looks at the job. Each costs the master some milliseconds of work."""
        self._job = job
        self._look_s = look_s

    def find(self, name: str, *, timeout_s: float = 60.0) -> Victim:
        """A running vertex by id, or the master by `master`; waits until it has a process."""

        def look(view: View) -> Victim | None:
            if name == "master":
                master = view["master"]
                alive = master["answering"] and master["pid"] and _lives(master["pid"])
                return Victim("master", master["epoch"], master["pid"]) if alive else None
            for vertex in view["vertices"]:
                if vertex["id"] == name and vertex["phase"] == "running" and vertex["pid"]:
                    return Victim(name, vertex["incarnation"], vertex["pid"])
            return None

        return self.until(look, f"{name} running", timeout_s=timeout_s)

    def kill(self, *names: str) -> list[Victim]:
        """SIGKILL, all of them as close together as signals can be sent."""
        victims = [self.find(name) for name in names]
        for victim in victims:
            _signal(victim.pid, signal.SIGKILL)
        return victims

    def stop(self, name: str) -> Victim:
        """SIGSTOP: alive for the kernel, silent for everybody else."""
        victim = self.find(name)
        _signal(victim.pid, signal.SIGSTOP)
        return victim

    def replaced(self, victim: Victim, *, timeout_s: float = 120.0) -> Victim:
        """Its successor, once that one runs."""

        def look(view: View) -> Victim | None:
            if victim.name == "master":
                master = view["master"]
                return (
                    Victim("master", master["epoch"], master["pid"])
                    if master["answering"] and master["epoch"] > victim.incarnation
                    else None
                )
            for vertex in view["vertices"]:
                if vertex["id"] == victim.name and vertex["incarnation"] > victim.incarnation:
                    return (
                        Victim(victim.name, vertex["incarnation"], vertex["pid"]) if vertex["pid"] else None
                    )
            return None

        return self.until(look, f"a successor of {victim.name}", timeout_s=timeout_s)

    def reach_step(self, step: int, *, timeout_s: float = 120.0) -> View:
        """The view once the job has done so many optimizer steps."""

        def look(view: View) -> View | None:
            done = max(view["job"]["step"], view["progress"].get("step") or 0)
            return view if done >= step or view["job"]["ended_at"] else None

        return self.until(look, f"step {step}", timeout_s=timeout_s)

    def until(self, look: Callable[[View], T | None], what: str, *, timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        while True:
            view = self._job.status()
            found = look(view)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                job = view["job"]
                raise TimeoutError(
                    f"no {what} within {timeout_s:g} s; the job is {job['phase']} at step {job['step']}: "
                    f"{job['message']} "
                    f"{[(v['id'], v['incarnation'], v['phase']) for v in view['vertices']]}"
                )
            time.sleep(self._look_s)


def _signal(pid: int, number: signal.Signals) -> None:
    process = ProcessIdentity.of(pid)
    if process is None or not process.signal(number):
        raise ProcessLookupError(pid)


def _lives(pid: int) -> bool:
    process = ProcessIdentity.of(pid)
    return process is not None and process.is_alive()
