"""The log of evaluations: a file of the job with one line for each policy version that was evaluated or left out.

Invariant *one line a version*: the first result of a version, or the first reason why it has none, is final.

This module must not know when an evaluation is due, or who makes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class EvaluationLog:
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The results, in the order in which they arrived."""
    left_out: dict[int, str] = field(default_factory=dict)
    """The versions that will have no result, with the reason."""

    @classmethod
    def of(cls, directory: Path) -> EvaluationLog:
        """The log in a job's directory, with what earlier trainers wrote."""
        log = cls(directory / "evaluations.jsonl")
        log.load()
        return log

    def load(self) -> None:
        if not self.path.exists():
            return
        lines: list[str] = []
        for line in self.path.read_text().splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                # A kill cut the line short: the evaluation is made again, and written to a line of its own.
                self.path.write_text("".join(line + "\n" for line in lines))
                break
            lines.append(line)

    def is_settled(self, version: int) -> bool:
        """Whether the version has a result, or will have none."""
        return version in self.left_out or any(row["version"] == version for row in self.rows)

    def add(self, row: dict[str, Any]) -> bool:
        """Write a result: `version`, `accuracy` and `count`. False where the version was settled already."""
        if self.is_settled(row["version"]):
            return False
        self._write(row)
        return True

    def leave_out(self, version: int, reason: str) -> bool:
        """Write that the version will have no result. False where it was settled already."""
        if self.is_settled(version):
            return False
        self._write({"version": version, "left_out": reason})
        return True

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "left_out" in line:
            self.left_out[line["version"]] = line["left_out"]
        else:
            self.rows.append(line)
