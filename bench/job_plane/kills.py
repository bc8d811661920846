"""Engines of a running job that are killed, one in turn, every so often; and what the job did by what lived."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from job_plane.account import living, rate
from job_plane.case import Row
from job_plane.watch import Watch

ENGINES = ("gyre_launch_server", "gyre_vllm_server", "gyre.engines.embedded")
"""Words in the command lines of engines, which their guards' have too."""

UNDISTURBED_STEPS = 8
"""Before the first kill, for the rate that the job has by itself."""


class Attack:
    """What is done to a running job, in a thread beside it. `rows` are the kills."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self.over = False
        self.rows: list[Row] = []
        self.ended_s = 0.0

    def start(self, home: Path, watch: Watch, began: float) -> None:
        self._home, self._watch, self._began = home, watch, began
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.ended_s = self.ended_s or time.time() - self._began
        self._end.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        raise NotImplementedError


class Kills(Attack):
    """By SIGKILL: the engine's own process, below its guard, which then ends the rest of it."""

    def __init__(self, *, every_s: float, for_s: float) -> None:
        super().__init__()
        self._every_s, self._for_s = every_s, for_s

    def _run(self) -> None:
        while self._watch.steps() < UNDISTURBED_STEPS:
            if self._end.wait(1.0):
                return
        first = time.time()
        turn = 0
        while time.time() - first < self._for_s - 1.0:
            self._kill(turn)
            turn += 1
            if self._end.wait(max(0.0, first + turn * self._every_s - time.time())):
                break
        self.ended_s = self.ended_s or time.time() - self._began
        self.over = True

    def _kill(self, turn: int) -> None:
        vertices = self._watch.vertices("rollout-")
        row: Row = {"at_s": round(time.time() - self._began, 3)}
        self.rows.append(row)
        if not vertices:
            row["error"] = "no rollout vertex is known"
            return
        name = sorted(vertices)[turn % len(vertices)]
        engines = engines_below(vertices[name])
        row |= {"vertex": name, "pids": [engine.pid for engine in engines]}
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.send_signal(signal.SIGKILL)

    def summary(self, steps: Sequence[Row], looks: Sequence[Row], engines: int) -> Row:
        """Tokens/s from the first kill on, beside what the job did before it times the share of engines that lived."""
        row: Row = {"kills": self.rows, "every_s": self._every_s}
        if not self.rows:
            return row | {"error": "nothing was killed: the job made too few steps"}
        first = self.rows[0]["at_s"]
        before = [step for step in steps if step["at_s"] < first]
        after = [step for step in steps if first <= step["at_s"] <= self.ended_s]
        during = [look for look in looks if first <= look["at_s"] <= self.ended_s]
        if len(before) < 3 or not after or not during:
            return row | {"error": "too few steps"}
        alive = sum(living(look) for look in during) / (engines * len(during))
        undisturbed = rate(before, before[1]["at_s"], before[-1]["at_s"]) or 0.0
        # The step that ended first in it was begun before, and one that was begun in it ends after: they even out.
        found = sum(step["tokens"] for step in after) / (self.ended_s - first)
        return row | {
            "undisturbed_tokens_s": undisturbed,
            "alive": alive,
            "tokens_s": found,
            "ideal_tokens_s": undisturbed * alive,
            "of_the_ideal": found / (undisturbed * alive) if undisturbed and alive else None,
            "back_s": [_back(killed["at_s"], looks, engines) for killed in self.rows],
        }


def engines_below(pid: int) -> list[psutil.Process]:
    """The engines' own processes below a vertex: those whose parent is the guard."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                parent = " ".join(process.parent().cmdline()) if process.parent() else ""
                if any(word in line for word in ENGINES) and "process_guard" in parent:
                    found.append(process)
    return found


def _back(killed_s: float, looks: Sequence[Row], engines: int) -> float | None:
    """How long until all engines have a policy again, from the first look at which one had none."""
    lost = next((look["at_s"] for look in looks if look["at_s"] > killed_s and living(look) < engines), None)
    if lost is None:
        return None
    back = next((look["at_s"] for look in looks if look["at_s"] > lost and living(look) >= engines), None)
    return round(back - killed_s, 1) if back is not None else None
