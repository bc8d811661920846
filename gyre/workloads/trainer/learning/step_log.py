"""What people see of each step: a line in the trainer's log, a line in `metrics.jsonl`, and warnings.

Invariants:
- *after the ledger*: a step is shown when it is recorded;
- *never in the way*: a log or a file that cannot be written does not end the run.

This module must not know how a step is made.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.learning.learning_watch import CODES, LearningWatch, Warned
from gyre.workloads.trainer.learning.step_line import step_line
from gyre.workloads.trainer.wait_causes import Shares
from gyre.workloads.trainer.wait_stats import waits_in


class KnowsWaits(Protocol):
    def times(self) -> Mapping[str, Shares]:
        """The share of recent time of each activity of each role."""


class StepLog:
    """`earlier` are the metrics of the steps that earlier trainers made; what they warned of is reported again, and the
    master ignores what it has."""

    def __init__(
        self,
        file: MetricsFile,
        watch: LearningWatch,
        *,
        earlier: Mapping[int, Mapping[str, Any]],
        steps_planned: int,
        waits: KnowsWaits,
        reports: HearsEvents,
    ) -> None:
        self._file = file
        self._watch = watch
        self._steps_planned = steps_planned
        self._waits = waits
        self._reports = reports
        watch.begin()
        for step, metrics in sorted(earlier.items()):
            watch.step({"step": step, **metrics})
        for code in CODES:
            if code in watch.held:
                self._tell(watch.held[code], again=bool(earlier))
            elif earlier:  # an earlier trainer may have warned of it at its end
                self._tell(Warned(code, "", max(earlier), holds=False))

    def completed(self, metrics: Mapping[str, Any]) -> None:
        self._file.add(int(metrics["step"]), metrics)
        _say(step_line(metrics, steps=self._steps_planned, waits=waits_in(self._waits.times())))
        for warned in self._watch.step(metrics):
            self._tell(warned)

    def ended(self) -> None:
        """The run is over."""
        for warned in self._watch.at_end():
            self._tell(warned)

    def _tell(self, warned: Warned, *, again: bool = False) -> None:
        """Report a warning, and say it unless it is `again`: then the log of an earlier trainer has it."""
        if warned.holds and not again:
            _say(f"! learning: {warned.message}")
        self._reports.report(
            "LearningWarned",
            code=warned.code,
            message=warned.message,
            step=warned.step,
            holds=warned.holds,
            again=again,
        )


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a disk without room: the ledger has the step, and the run goes on
        print(line, flush=True)


NAME = "metrics.jsonl"


class MetricsFile:
    """The file in `directory`, brought up to `steps`, which are the metrics of all steps in the ledger.

    Invariants:
    - *one line a step*: the file is what the ledger's steps make of it. A trainer that starts compares the two, and
      writes the file anew where they differ: a line that a kill cut short, a step that is in the ledger alone;
    - *a disk without room ends nothing*: lines that could not be written come with the next that can.
    """

    def __init__(self, directory: Path, steps: Mapping[int, Mapping[str, Any]]) -> None:
        self._path = directory / NAME
        self._waiting: list[str] = []
        """Lines that are not in the file yet."""
        self._size = 0
        """How long the file is up to its last whole line."""
        try:
            self._bring_up(steps)
        except OSError:  # no room: the file is written anew by the next trainer that can
            self._waiting = [_line(step, metrics) for step, metrics in sorted(steps.items())]

    def _bring_up(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        if self._path.exists() and _steps_in(self._path) == sorted(steps):
            self._size = self._path.stat().st_size
            return
        made = self._path.with_suffix(".new")
        with made.open("w") as file:
            file.writelines(_line(step, metrics) for step, metrics in sorted(steps.items()))
        os.replace(made, self._path)
        self._size = self._path.stat().st_size

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._waiting.append(_line(step, metrics))
        data = "".join(self._waiting).encode()
        try:
            with self._path.open("ab") as file:
                if file.tell() != self._size:  # half a line of a write that failed
                    file.truncate(self._size)
                file.write(data)
        except OSError:
            return
        self._size += len(data)
        self._waiting.clear()


def _line(step: int, metrics: Mapping[str, Any]) -> str:
    return json.dumps({"step": step, **metrics}, separators=(",", ":")) + "\n"


def _steps_in(path: Path) -> list[int] | None:
    """The steps of the lines; None where the file is not whole lines of steps."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        return None
    try:
        return [json.loads(line)["step"] for line in data.splitlines()]
    except (ValueError, KeyError, TypeError):
        return None
