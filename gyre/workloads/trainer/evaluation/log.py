"""The log of evaluations: a file of the job with one line for each policy version and held-out set that was evaluated
or left out.

Invariant *one line a version and set*: the first result of a set by a version, or the first reason why there is none,
is final.

This module must not know when an evaluation is due, or who makes it.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.config.sections import HELD_OUT
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey

KEPT_ROWS = 1000
"""Newest results kept in memory: more than a new trainer reports again, also of some tens of sets."""


@dataclass(slots=True)
class EvaluationLog:
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The first result of each set and the newest of all (`gyre.workloads.trainer.evaluation.results`), in the order in
    which they arrived; the file has every one."""
    left_out: dict[EvaluationKey, str] = field(default_factory=dict)
    """What will have no result, with the reason."""
    _evaluated: set[EvaluationKey] = field(default_factory=set)

    @classmethod
    def of(cls, directory: Path) -> EvaluationLog:
        """The log in a job's directory, with what earlier trainers wrote."""
        log = cls(directory / "evaluations.jsonl")
        log.load()
        return log

    def load(self) -> None:
        if not self.path.exists():
            return
        size = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                self._take(json.loads(line))
            except ValueError:
                # A kill or a full disk cut the line short: the evaluation is made again, and written to a line of its
                # own. Cut off, not written anew: that needs no room.
                os.truncate(self.path, size)
                break
            size += len(line)

    def is_settled(self, evaluation: EvaluationKey) -> bool:
        """Whether there is a result, or will be none."""
        return evaluation in self.left_out or evaluation in self._evaluated

    def add(self, row: dict[str, Any]) -> bool:
        """Write a result. False where its version and set were settled already."""
        if self.is_settled(_evaluation_of(row)):
            return False
        self._write(row)
        return True

    def leave_out(self, evaluation: EvaluationKey, reason: str) -> bool:
        """Write that there will be no result. False where it was settled already."""
        if self.is_settled(evaluation):
            return False
        self._write({"version": evaluation.version, "set": evaluation.set, "left_out": reason})
        return True

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(data) != len(data):  # the rest has no room
                os.truncate(self.path, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "left_out" in line:
            self.left_out[_evaluation_of(line)] = line["left_out"]
        else:
            self._evaluated.add(_evaluation_of(line))
            self.rows.append(line)
            if len(self.rows) >= 2 * KEPT_ROWS:  # at times, for it looks at all of them
                first = {row.get("set"): row for row in reversed(self.rows)}
                earlier = [row for row in self.rows[:-KEPT_ROWS] if first[row.get("set")] is row]
                self.rows = earlier + self.rows[-KEPT_ROWS:]


def _evaluation_of(line: dict[str, Any]) -> EvaluationKey:
    return EvaluationKey(line["version"], line.get("set", HELD_OUT))  # older lines name no set
