"""What happens to the job: each fault strikes, lasts for a while, and is made good."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.machine import SmallDisk
from tests.soak.cluster import Machine, SoakCluster

View = dict[str, Any]

WATCHED = ("master", "rollout_manager", "trainer")
"""The roles whose memory must not grow."""


@dataclass
class Tally:
    """How often a fault struck, and the processes that it killed."""

    strikes: int = 0
    killed: int = 0


@dataclass
class Faults:
    """Strikes a running job. `status` gives its view, `disk` holds its home, `database` is its store.

    A process is not struck again before the job has made a step: budgets count deaths without progress, so a job that
    is struck faster than it can step ends, as it should. While `sparing` is true, no fault kills or stops master,
    manager or trainer, nor the machines that they are on:
    whether their memory grows can only be seen if they live for long.
    """

    cluster: SoakCluster
    status: Callable[[], View]
    disk: SmallDisk
    disk_kb: int
    database: Path
    machines: int
    chance: random.Random
    tallies: dict[str, Tally] = field(default_factory=dict)
    say: Callable[[str], None] = print
    sparing: bool = False
    struck_at: dict[str, int] = field(default_factory=dict)
    """By role, the step of the job when one of its processes was killed last."""

    def strike(self) -> None:
        """One fault of a kind drawn by weight; it is over when this returns."""
        kinds: dict[Callable[[], int], int] = {
            self.kill_a_process: 60,
            self.kill_several: 8,
            self.kill_an_engine: 8,
            self.stop_a_process: 4,
            self.lose_a_machine: 4,
            self.notice: 4,
            self.hang_a_machine: 2,
            self.reset_connections: 4,
            self.swallow: 4,
            self.throttle: 2,
            self.lock_the_store: 3,
            self.fill_the_disk: 2,
        }
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        tally = self.tallies.setdefault(kind.__name__, Tally())
        killed = kind()
        tally.strikes += 1
        tally.killed += killed
        self.mend()

    def mend(self) -> None:
        """Bring the cluster back to its number of machines."""
        for machine in [one for one in self.cluster.machines if not one.is_up]:
            self.cluster.remove(machine)
        while len(self.cluster.machines) < self.machines:
            self.cluster.add(off_s=self.chance.choice([0.0, 0.0, -300.0, 40.0, 86_400.0]))

    # -- processes ----------------------------------------------------------------------------------

    def kill_a_process(self) -> int:
        return self._kill(1)

    def kill_several(self) -> int:
        return self._kill(self.chance.randint(2, 5))

    def _kill(self, count: int) -> int:
        victims = self._victims()
        chosen = self.chance.sample(victims, min(count, len(victims)))
        killed = [one for one in chosen if one.signal(signal.SIGKILL)]
        step = step_of(self.status())
        self.struck_at |= {one.role: step for one in killed}
        self.say(f"killed {', '.join(one.name for one in killed) or 'nobody'}")
        return len(killed)

    def _victims(self) -> list[Known]:
        view = self.status()
        step = step_of(view)
        return [
            one
            for one in processes_of(view)
            if not (self.sparing and one.is_watched) and self.struck_at.get(one.role, -1) < step
        ]

    def kill_an_engine(self) -> int:
        engines = []
        for agent in self._victims():
            if agent.name.startswith("rollout-"):
                with contextlib.suppress(psutil.Error):  # the agent has died, and its engine with it
                    engines += [one for one in agent.process.children(recursive=True) if _is_engine(one)]
        if not engines:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            self.chance.choice(engines).kill()  # psutil compares the start time
            self.say("killed an engine")
            return 1
        return 0

    def stop_a_process(self) -> int:
        victims = self._victims()
        if not victims:
            return 0
        victim = self.chance.choice(victims)
        seconds = self.chance.uniform(2.0, 20.0)
        self.say(f"stopped {victim.name} for {seconds:.0f} s")
        victim.signal(signal.SIGSTOP)
        time.sleep(seconds)
        victim.signal(signal.SIGCONT)
        return 0

    # -- machines -----------------------------------------------------------------------------------

    def _machine(self) -> Machine | None:
        """One that may be struck, if there is one."""
        spared = {one.process.pid for one in processes_of(self.status()) if self.sparing and one.is_watched}
        found = [one for one in self.cluster.machines if spared.isdisjoint(one.link.processes())]
        return self.chance.choice(found) if found else None

    def lose_a_machine(self) -> int:
        if (machine := self._machine()) is None:
            return 0
        killed = len(machine.link.processes())
        machine.kill()
        away = self.chance.uniform(0.0, 30.0)
        self.say(f"{machine.link.address} lost its power; another comes in {away:.0f} s")
        time.sleep(away)
        return killed

    def notice(self) -> int:
        if (machine := self._machine()) is None:
            return 0
        within = self.chance.uniform(2.0, 20.0)
        self.say(f"{machine.link.address} will be taken back in {within:.0f} s")
        self.cluster.notify(machine, within)
        time.sleep(within)
        killed = len(machine.link.processes())
        machine.kill()
        return killed

    def hang_a_machine(self) -> int:
        if (machine := self._machine()) is None:
            return 0
        seconds = self.chance.uniform(1.0, 15.0)
        machine.link.signal_all(signal.SIGSTOP)
        self.say(f"{machine.link.address} hangs for {seconds:.0f} s")
        time.sleep(seconds)
        machine.link.signal_all(signal.SIGCONT)
        return 0

    # -- connections --------------------------------------------------------------------------------

    def reset_connections(self) -> int:
        if (machine := self._machine()) is None:
            return 0
        machine.link.reset()
        self.say(f"connections of {machine.link.address} are reset")
        return 0

    def swallow(self) -> int:
        if (machine := self._machine()) is None:
            return 0
        seconds = self.chance.choice([0.5, 1.0, 2.0, 12.0])
        machine.link.swallow()
        self.say(f"the cable of {machine.link.address} swallows for {seconds:g} s")
        time.sleep(seconds)
        machine.link.heal()
        return 0

    def throttle(self) -> int:
        if (machine := self._machine()) is None:
            return 0
        machine.link.throttle()
        self.say(f"the cable of {machine.link.address} is slow for 10 s")
        time.sleep(10.0)
        machine.link.heal()
        return 0

    # -- the store and the disk ---------------------------------------------------------------------

    def lock_the_store(self) -> int:
        seconds = self.chance.uniform(1.0, 8.0)
        self.say(f"the store is locked for {seconds:.0f} s")
        with (
            contextlib.closing(
                sqlite3.connect(self.database, timeout=5.0, isolation_level=None)
            ) as connection,
            contextlib.suppress(sqlite3.OperationalError),
        ):  # whoever writes does not let us in
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")
        return 0

    def fill_the_disk(self) -> int:
        seconds = self.chance.uniform(2.0, 10.0)
        self.say(f"the disk is full for {seconds:.0f} s")
        try:
            self.disk.fill()
            time.sleep(seconds)
        finally:
            self.disk.resize(self.disk_kb)
        return 0


@dataclass(frozen=True, slots=True)
class Known:
    """A process of the job, by what its view says and when it started."""

    name: str
    incarnation: int
    process: psutil.Process

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def is_watched(self) -> bool:
        return self.role in WATCHED

    def signal(self, number: signal.Signals) -> bool:
        """Whether it was there to get it. A pid that has been given to another since is not struck."""
        try:
            self.process.send_signal(number)  # psutil compares the start time
        except psutil.NoSuchProcess:
            return False
        return True


def step_of(view: View) -> int:
    return int(max(view["job"]["step"], view["progress"].get("step") or 0))


def processes_of(view: View) -> list[Known]:
    """Those that run, by a view that says so now, and that are the job's by their command line: a view may be older
    than the processes."""
    told = [
        (one["id"], one["incarnation"], one["pid"]) for one in view["vertices"] if one["phase"] == "running"
    ]
    if view["master"]["answering"]:
        told.append(("master", view["master"]["epoch"], view["master"]["pid"]))
    found = []
    for name, incarnation, pid in told:
        with contextlib.suppress(psutil.Error):  # it has gone
            process = psutil.Process(pid) if pid else None
            if process is not None and _is_actor(process):
                found.append(Known(name, incarnation, process))
    return found


def _is_actor(process: psutil.Process) -> bool:
    """Whether it is a process that Ray runs actors in."""
    return any(part.startswith("ray::") for part in process.cmdline()[:1])


def _is_engine(process: psutil.Process) -> bool:
    """Whether it is the engine itself, not the process that guards it."""
    command = process.cmdline()
    return "gyre.engines.embedded" in command and "-I" not in command
