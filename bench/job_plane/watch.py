"""Watches a running job from outside: its rollout plane, its GPUs, the machine's cores, and profiles of its processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from job_plane.account import events_of
from job_plane.case import Row

EVERY_S = 0.1

CORES_EVERY_S = 1.0

FRESH_S = 2.0
"""A look at the plane that is older says nothing of now."""

PROFILED = ("trainer-0", "actor-0", "rollout_manager-0", "rollout-0")


CORES_OF = 12
"""Of so many processes, those that work most."""


def cpu_of_processes() -> dict[int, tuple[str, float]]:
    """Name and seconds of CPU of each process."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = (process.name(), times.user + times.system)
    return found


class Watch:
    """A context manager over a job whose home is `home`. It writes `NAME_plane.jsonl`, `NAME_gpus.csv`, `NAME_cores.jsonl`
    (how many cores work, how many the machine's host has given to others meanwhile, and whose they are) and, where
    `profile_at_step` is given, `NAME_VERTEX.folded` (py-spy's stacks over `profile_s` seconds) to `out`. `began` is
    when the command was started."""

    def __init__(
        self,
        home: Path,
        out: Path,
        name: str,
        began: float,
        profile_at_step: int = 0,
        profile_s: float = 20.0,
    ) -> None:
        self._home, self._out, self._name = home, out, name
        self._began = began
        self._profile_at_step, self._profile_s = profile_at_step, profile_s
        self._over = threading.Event()
        self._threads = [threading.Thread(target=of, daemon=True) for of in (self._plane, self._cores)]
        if profile_at_step:
            self._threads.append(threading.Thread(target=self._profiles, daemon=True))
        self._gpus: subprocess.Popen[bytes] | None = None
        self._reading = threading.Lock()
        self._events: list[Row] = []
        self._seq = 0
        self._look: Row = {"at_s": -1e9, "instances": []}

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        ask = [
            "nvidia-smi",
            "--query-gpu=timestamp,index,utilization.gpu,memory.used",
            "--format=csv,noheader",
        ]
        try:
            with (self._out / f"{self._name}_gpus.csv").open("wb") as file:
                self._gpus = subprocess.Popen([*ask, "-lms", "500"], stdout=file)
        except FileNotFoundError:  # no GPUs here
            pass
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        if self._gpus is not None:
            self._gpus.kill()
            self._gpus.wait()
        for thread in self._threads:
            thread.join(self._profile_s + 10.0)

    def _plane(self) -> None:
        with (self._out / f"{self._name}_plane.jsonl").open("w") as file:
            while not self._over.wait(EVERY_S):
                try:
                    status = self._status()
                except (OSError, ValueError, StopIteration):  # not there yet, or between two
                    continue
                self._look = {"at_s": round(time.time() - self._began, 3)} | status
                file.write(json.dumps(self._look) + "\n")

    def _cores(self) -> None:
        before, used, at_s = psutil.cpu_times(), cpu_of_processes(), time.time()
        with (self._out / f"{self._name}_cores.jsonl").open("w") as file:
            while not self._over.wait(CORES_EVERY_S):
                now, uses, looked_s = psutil.cpu_times(), cpu_of_processes(), time.time()
                took_s = looked_s - at_s
                grown = {
                    pid: (name, cpu_s - used.get(pid, ("", 0.0))[1]) for pid, (name, cpu_s) in uses.items()
                }
                most = sorted(grown.items(), key=lambda one: -one[1][1])[:CORES_OF]
                row = {
                    "at_s": round(looked_s - self._began, 3),
                    "cores": round((now.user + now.system - before.user - before.system) / took_s, 2),
                    "steal": round((now.steal - before.steal) / took_s, 2),
                    "of": {f"{name} {pid}": round(cpu_s / took_s, 2) for pid, (name, cpu_s) in most},
                }
                file.write(json.dumps(row) + "\n")
                before, used, at_s = now, uses, looked_s

    def _status(self) -> dict[str, Any]:
        told = json.loads(next(self._home.glob("jobs/*/rollouts.json")).read_text())
        request = urllib.request.Request(
            told["url"] + "/v1/status", headers={"Authorization": f"Bearer {told['secret']}"}
        )
        with urllib.request.urlopen(request, timeout=2.0) as response:
            status = json.load(response)
        keys = (
            "running",
            "samples",
            "version",
            "state",
            "tokens",
            "rate_tokens_s",
            "max_running",
            "kv_tokens",
        )
        return {
            "queued": status["queued"],
            "open_groups": status["open_groups"],
            "instances": [{key: one.get(key) for key in keys} for one in status["instances"]],
        }

    def all_serve(self, engines: int) -> bool:
        """Whether there are so many engines, and all that are there, spares too, have a policy, by the last look; False
        where that is too old to say."""
        look = self._look
        fresh = time.time() - self._began - look["at_s"] < FRESH_S
        versions = [one["version"] for one in look["instances"]]
        return fresh and len(versions) >= engines and min(versions, default=-1) >= 0

    # -- the journal --------------------------------------------------------------------------------

    def steps(self) -> int:
        """Steps that the job has made so far."""
        return sum(event["kind"] == "StepCompleted" for event in self.events())

    def vertices(self, prefix: str = "") -> dict[str, int]:
        """The process of each vertex whose name begins so, as it was started last."""
        told = (event["body"] for event in self.events() if event["kind"] == "VertexStarted")
        pids = {body["vertex"]: body["pid"] for body in told}
        return {name: pid for name, pid in pids.items() if name.startswith(prefix)}

    def master(self) -> dict[str, int]:
        """The process of the last master, by its name."""
        pids = [event["body"]["pid"] for event in self.events() if event["kind"] == "MasterStarted"]
        return {"master": pids[-1]} if pids else {}

    def events(self) -> list[Row]:
        """All events so far, each with `at_s`, `kind` and `body`."""
        from gyre.errors import GyreError

        with self._reading:
            try:
                found = events_of(self._home, self._began, after=self._seq)
            except (GyreError, IndexError):  # no job yet
                found = []
            if found:
                self._seq = found[-1]["seq"]
            self._events += found
            return list(self._events)

    def _profiles(self) -> None:
        while self.steps() < self._profile_at_step:
            if self._over.wait(1.0):
                return
        pids = self.vertices()
        started = []
        for vertex in PROFILED:
            file = self._out / f"{self._name}_{vertex}.folded"
            command = ["py-spy", "record", "-d", f"{self._profile_s:g}", "-r", "50", "-t", "-f", "raw"]
            command += ["-o", str(file), "-p", str(pids[vertex])]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for one in started:
            one.wait()
