"""What happens to the job: each fault strikes, lasts for a while, and is made good."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.soak.cluster import Machine, SoakCluster

View = dict[str, Any]


@dataclass
class Tally:
    """How often a fault struck, and the processes that it killed."""

    strikes: int = 0
    killed: int = 0


@dataclass
class Faults:
    """Strikes a running job. `status` gives its view, `home` is its file system, `database` its store."""

    cluster: SoakCluster
    status: Callable[[], View]
    home: Path
    database: Path
    machines: int
    chance: random.Random
    tallies: dict[str, Tally] = field(default_factory=dict)
    say: Callable[[str], None] = print

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
        victims = self._processes()
        chosen = self.chance.sample(victims, min(count, len(victims)))
        for _, pid in chosen:
            _signal(pid, signal.SIGKILL)
        self.say(f"killed {', '.join(name for name, _ in chosen)}")
        return len(chosen)

    def _processes(self) -> list[tuple[str, int]]:
        view = self.status()
        found = [
            (one["id"], one["pid"]) for one in view["vertices"] if one["phase"] == "running" and one["pid"]
        ]
        if view["master"]["pid"]:
            found.append(("master", view["master"]["pid"]))
        return found

    def kill_an_engine(self) -> int:
        engines = []
        for name, pid in self._processes():
            if name.startswith("rollout-"):
                with contextlib.suppress(psutil.Error):  # the agent has died, and its engine with it
                    engines += [
                        one.pid for one in psutil.Process(pid).children(recursive=True) if _is_engine(one)
                    ]
        if not engines:
            return 0
        _signal(self.chance.choice(engines), signal.SIGKILL)
        self.say("killed an engine")
        return 1

    def stop_a_process(self) -> int:
        victims = self._processes()
        if not victims:
            return 0
        name, pid = self.chance.choice(victims)
        _signal(pid, signal.SIGSTOP)
        seconds = self.chance.uniform(2.0, 20.0)
        self.say(f"stopped {name} for {seconds:.0f} s")
        time.sleep(seconds)
        _signal(pid, signal.SIGCONT)
        return 0

    # -- machines -----------------------------------------------------------------------------------

    def _machine(self) -> Machine:
        return self.chance.choice(self.cluster.machines)

    def lose_a_machine(self) -> int:
        machine = self._machine()
        killed = len(machine.link.processes())
        machine.kill()
        away = self.chance.uniform(0.0, 30.0)
        self.say(f"{machine.link.address} lost its power; another comes in {away:.0f} s")
        time.sleep(away)
        return killed

    def notice(self) -> int:
        machine = self._machine()
        within = self.chance.uniform(2.0, 20.0)
        self.say(f"{machine.link.address} will be taken back in {within:.0f} s")
        self.cluster.notify(machine, within)
        time.sleep(within)
        killed = len(machine.link.processes())
        machine.kill()
        return killed

    def hang_a_machine(self) -> int:
        machine = self._machine()
        seconds = self.chance.uniform(1.0, 15.0)
        machine.link.signal_all(signal.SIGSTOP)
        self.say(f"{machine.link.address} hangs for {seconds:.0f} s")
        time.sleep(seconds)
        machine.link.signal_all(signal.SIGCONT)
        return 0

    # -- connections --------------------------------------------------------------------------------

    def reset_connections(self) -> int:
        machine = self._machine()
        machine.link.reset()
        self.say(f"connections of {machine.link.address} are reset")
        return 0

    def swallow(self) -> int:
        machine = self._machine()
        seconds = self.chance.choice([0.5, 1.0, 2.0, 12.0])
        machine.link.swallow()
        self.say(f"the cable of {machine.link.address} swallows for {seconds:g} s")
        time.sleep(seconds)
        machine.link.heal()
        return 0

    def throttle(self) -> int:
        machine = self._machine()
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
        rubbish = self.home / "rubbish"
        try:
            with contextlib.suppress(OSError), open(rubbish, "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
            time.sleep(seconds)
        finally:
            rubbish.unlink(missing_ok=True)
        return 0


def _is_engine(process: psutil.Process) -> bool:
    """Whether it is the engine itself, not the process that guards it."""
    command = process.cmdline()
    return "gyre.engines.embedded" in command and "-I" not in command


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it died meanwhile
        os.kill(pid, number)
