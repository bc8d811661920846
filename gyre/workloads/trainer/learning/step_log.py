"""What people see of each step: a line in the trainer's log, a line in `metrics.jsonl`, and warnings.

Invariants:
- *after the ledger*: a step is shown when it is recorded;
- *never in the way*: a log or a file that cannot be written does not end the run.

This module must not know how a step is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from gyre.workloads.trainer.learning.learning_watch import CODES, LearningWatch, Warned
from gyre.workloads.trainer.learning.metrics_file import MetricsFile
from gyre.workloads.trainer.learning.step_line import step_line


class StepLog:
    """`earlier` are the metrics of the steps that earlier trainers made; what they warned of is reported again, and the
    master ignores what it has. `waits()` says who waits for whom, `report` sends an event to the journal."""

    def __init__(
        self,
        file: MetricsFile,
        watch: LearningWatch,
        *,
        earlier: Mapping[int, Mapping[str, Any]],
        steps_planned: int,
        waits: Callable[[], Mapping[str, float]],
        report: Callable[..., None],
    ) -> None:
        self._file = file
        self._watch = watch
        self._steps_planned = steps_planned
        self._waits = waits
        self._report = report
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
        _say(step_line(metrics, steps=self._steps_planned, waits=self._waits()))
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
        self._report(
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
