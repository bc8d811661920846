"""What the held-out set said of each policy version, kept in a file of the job so that a new trainer knows it too."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Evaluations:
    """Held-out results so far, kept in a file of the job so that a new trainer knows them too."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def load(self) -> None:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                self.rows.append(json.loads(line))
            except ValueError:
                # Cut short by a kill: the evaluation is simply made again, on a line of its own.
                self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
                break

    def add(self, row: dict[str, Any]) -> None:
        if any(known["version"] == row["version"] for known in self.rows):
            return
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
