"""Peers of bench/weights.py as processes that answer in time, or are ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Late(Exception):
    """Something took longer than it may."""


class Clock:
    """What is left of the whole run. `least(seconds)` is how long one thing may take."""

    def __init__(self, limit_s: float) -> None:
        self.until = time.monotonic() + limit_s

    def least(self, seconds: float) -> float:
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            raise Late("the run's time is over")
        return min(seconds, left_s)


class Child:
    """A peer in its own process."""

    def __init__(self, clock: Clock, role: str, **options: Any) -> None:
        self.role, self._clock = role, clock
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_process.py"), role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        self._heard = b""

    def hear(self, limit_s: float = 60.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        limit_s = self._clock.least(limit_s)
        until = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([self.process.stdout], [], [], left_s)[0]:
                raise Late(f"the peer {self.role!r} has not answered for {limit_s:.0f} s, all that it had")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"the peer {self.role!r} has died: {self.process.wait(10)}")
            self._heard += part
        line, self._heard = self._heard.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, what: str, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps([what, options]) + "\n").encode())
        self.process.stdin.flush()

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        self.tell(what, **options)
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Children:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._made: list[Child] = []

    def start(self, role: str, count: int = 1, **options: Any) -> list[Child]:
        """So many at once, ready. `options` may have `{n}` in a text, for the number of each."""
        made = []
        for number in range(count):
            told = {
                key: value.format(n=number) if isinstance(value, str) else value
                for key, value in options.items()
            }
            made.append(Child(self._clock, role, **told))
            self._made.append(made[-1])
        for child in made:
            child.hear()
        return made

    def one(self, role: str, **options: Any) -> Child:
        return self.start(role, **options)[0]


@contextlib.contextmanager
def children(clock: Clock) -> Iterator[Children]:
    """All are ended however the block ends."""
    made = Children(clock)
    try:
        yield made
    finally:
        for child in made._made:
            child.end()
