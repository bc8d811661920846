"""`metrics.jsonl` in a job's directory: one line for each optimizer step, with the metrics of the step.

Invariants:
- *one line a step*: the file is what the ledger's steps make of it. A trainer that starts compares the two, and writes
  the file anew where they differ: a line that a kill cut short, a step that is in the ledger alone;
- *a disk without room ends nothing*: lines that could not be written come with the next that can.

This module must not know what the metrics mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"


class MetricsFile:
    """The file in `directory`, brought up to `steps`, which are the metrics of all steps in the ledger."""

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
