"""Watches a running job from outside: its rollout plane, its GPUs, and profiles of its processes."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from job_plane.account import events_of
from job_plane.case import Row

EVERY_S = 0.1

FRESH_S = 2.0
"""A look at the plane that is older says nothing of now."""

PROFILED = ("trainer-0", "actor-0", "rollout_manager-0", "rollout-0")


class Watch:
    """A context manager over a job whose home is `home`. It writes `NAME_plane.jsonl`, `NAME_gpus.csv` and, where
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
        self._threads = [threading.Thread(target=self._plane, daemon=True)]
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
