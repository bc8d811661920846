"""A process of a bench, which says JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

ENDS_S = 20.0
"""For a child whose stdin is closed: a manager writes its last batch."""


class Child:
    """A script with its options, as JSON behind `words`; `under` is a command that runs it."""

    def __init__(self, script: Path, options: dict[str, Any], *words: str, under: Sequence[str] = ()) -> None:
        path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environment = {
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [*under, sys.executable, str(script), *words, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and not line.startswith("{"):
            pass  # of the command that it runs under
        if not line:
            raise SystemExit(f"{self.process.args!r:.300} has died: {self.process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, line: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def child(script: Path, options: dict[str, Any], *words: str, under: Sequence[str] = ()) -> Iterator[Child]:
    made = Child(script, options, *words, under=under)
    try:
        yield made
    finally:
        made.end()


def published(folder: Path) -> dict[str, str]:
    """A policy for the simulated engines."""
    from gyre.weights.version.model_folder import list_model_folder

    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return {"path": str(folder), "checksum": list_model_folder(folder, version=0).checksum}
