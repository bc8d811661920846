"""What the held-out set said of each policy version, kept in a file of the job so that a new trainer knows it too.

Invariant *told once*: of each version that was to be evaluated the file has one line: what came of it, or why nothing
will.

This module must not know when an evaluation is due, or who makes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Evaluations:
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The results, in the order in which they came."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Versions that have none and get none, with the reason."""

    def load(self) -> None:
        if not self.path.exists():
            return
        lines: list[str] = []
        for line in self.path.read_text().splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                # Cut short by a kill: the evaluation is simply made again, on a line of its own.
                self.path.write_text("".join(line + "\n" for line in lines))
                break
            lines.append(line)

    def is_settled(self, version: int) -> bool:
        """Whether the version needs no evaluation, or none any more."""
        return version in self.left_out or any(row["version"] == version for row in self.rows)

    def add(self, row: dict[str, Any]) -> bool:
        """`version`, `accuracy` and `count`. False where the version is settled already."""
        if self.is_settled(row["version"]):
            return False
        self._write(row)
        return True

    def leave_out(self, version: int, reason: str) -> bool:
        """There is no result of the version. False where it is settled already."""
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
