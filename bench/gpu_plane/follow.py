"""What a process of a bench writes, line by line, and how another follows it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
now = time.monotonic  # one clock for all processes of this machine


class PartFailed(Exception):
    """A part cannot go on."""


class Log:
    """Lines of JSON with the time, for whoever follows."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"at": now(), "kind": kind, **fields}) + "\n")


class Follow:
    """The lines that a process of ours writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._offset = 0

    def rows(self, kind: str | None = None, after: float = 0.0, **match: Any) -> list[Row]:
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._rows += [json.loads(line) for line in whole.splitlines()]
        return [
            row
            for row in self._rows
            if row["at"] >= after
            and kind in (None, row["kind"])
            and all(row.get(key) == value for key, value in match.items())
        ]

    def wait(self, kind: str, until: float, after: float = 0.0, **match: Any) -> Row:
        """The first such line. Raises PartFailed when none comes in time."""
        while not (found := self.rows(kind, after, **match)):
            if now() > until:
                raise PartFailed(f"no {kind} {match} in time in {self.path.name}")
            time.sleep(0.02)
        return found[0]
