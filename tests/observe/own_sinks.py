"""Sinks of a user's own, for tests: what they were told is a line in a file; the first time some of them misbehave."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from gyre.observe.sinks.sink import SinkEvaluation, SinkJob, SinkWarning


class Told:
    """Appends what it is told to `job.to`, as lines of JSON."""

    def __init__(self, job: SinkJob, *, die_at: int = 0, hang_at: int = 0) -> None:
        self._path = Path(job.to)
        self._once = Path(f"{job.to}.misbehaved")
        self._die_at, self._hang_at = die_at, hang_at

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        if step in (self._die_at, self._hang_at) and not self._once.exists():
            self._once.touch()
            if step == self._die_at:
                os._exit(9)
            time.sleep(3600.0)
        self._tell(["step", step, numbers.get("reward_mean")])

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        self._tell(["evaluation", evaluation.set, evaluation.version, evaluation.numbers["accuracy"]])

    def warning(self, warning: SinkWarning) -> None:
        self._tell(["warning", warning.code, warning.holds])

    def flush(self) -> None:
        self._tell(["flush"])

    def close(self) -> None:
        self._tell(["close"])

    def _tell(self, what: list[Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(what) + "\n")


def told(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
