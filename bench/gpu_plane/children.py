"""Processes that a bench starts, and how it ends them: any role of its script, and an instance."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import psutil

from gpu_plane.follow import Follow, PartFailed, Row, now

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """The script of the bench in another role."""

    script: ClassVar[Path]
    """Set by the script itself, when it begins."""

    def __init__(self, role: str, options: Row, output: Path) -> None:
        self.options = options
        with open(output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(self.script), f"--{role}", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                },
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tree(self) -> list[psutil.Process]:
        try:
            me = psutil.Process(self.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to it and all below it; who they were."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        return tree

    def stop(self, within_s: float) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
        self.kill()


class Instance(Child):
    def __init__(self, place: Path, options: Row) -> None:
        self.name = options["name"]
        self.began = now()
        number = len(list(place.glob(f"agent-{self.name}-*.jsonl")))
        self.log = Follow(place / f"agent-{self.name}-{number}.jsonl")
        self.tail = place / f"engine-{self.name}-{number}.tail"
        whole = {**options, "log": str(self.log.path), "tail": str(self.tail)}
        super().__init__("agent", whole, place / f"agent-{self.name}-{number}.out")

    def engine_url(self) -> str:
        found = self.log.rows("engine")
        if not found:
            raise PartFailed(f"{self.name} has no engine")
        return str(found[-1]["url"])

    def check(self) -> None:
        if self.process.poll() is not None:
            failed = self.log.rows("failed")
            raise PartFailed(
                f"agent {self.name} ended: {failed[-1]['error'] if failed else self.process.poll()}"
            )
