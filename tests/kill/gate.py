"""A gate in a job's reward, so that the job waits for its test and not the test for the job, however fast either is.

The reward scores no group of a step beyond the number in a file of the job's directory. Until the test has said
something that is `FIRST`; a job whose config does not ask for the gate has none.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gyre.workloads import BaseWorkload

FIRST = 2
WIDE_OPEN = 1_000_000
LOOK_S = 0.02


class Gate:
    """The test's side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open_to(self, step: int) -> None:
        """The job goes on up to the end of this step, and waits there."""
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / "gate.partial"
        partial.write_text(str(step))
        partial.rename(self._directory / "gate")

    def open(self) -> None:
        self.open_to(WIDE_OPEN)


def wait_at_gate(workload: BaseWorkload, step: int) -> None:
    """The job's side: returns when groups of this step may be scored. It stands still through no fault of its own."""
    config: dict[str, Any] = workload.config
    while config.get("gated") and step > _limit(workload.context.directory / "gate"):
        workload.report_progress()
        time.sleep(LOOK_S)


def _limit(file: Path) -> int:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return FIRST
