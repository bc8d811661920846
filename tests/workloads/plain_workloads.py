"""Workloads of every kind that a host may meet, and a small cluster of them without a job around it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre.testing.in_process import EPOCH, InProcessHost, InProcessTransport, InProcessVertex, Moments
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.handles import RoleHandle
from gyre.workloads.vertex.membership import Membership
from gyre.workloads.vertex.messages import Binding
from tests.waits import GENEROUS_S

HERE = "tests.workloads.plain_workloads"


def binding(name: str = "Echo", *, module: str = HERE, vertex: str = "echo-0", **changes: Any) -> Binding:
    role, _, rank = vertex.rpartition("-")
    fields: dict[str, Any] = {
        "job_id": "j1",
        "job_name": "job",
        "role": role,
        "rank": int(rank),
        "world_size": 3,
        "local_rank": 1,
        "incarnation": 1,
        "module": module,
        "name": name,
        "file": None,
        "config": {"key": 7},
        "env": {},
        "python_path": [],
        "directory": "/nowhere",
        "log_path": "",
        "orphan_timeout_s": math.inf,
        **changes,
    }
    return Binding(**fields)


class Odd(BaseWorkload):
    """What it says of itself is not JSON, and its version is numpy's; later there is none."""

    def setup(self) -> None:
        self.steps = np.int64(7)

    @property
    def version(self) -> Any:
        if self.steps is None:
            raise RuntimeError("no model any more")
        return self.steps

    def health(self) -> dict[str, Any]:
        return {"loss": math.nan, "lock": threading.Lock()}

    def work(self) -> None:
        self.report_progress(loss=np.float32(0.5), gradient=torch.tensor([1.0, math.inf]))
        self.context.report("Mine", {"reward": torch.tensor(0.25), "best": (math.nan,)})

    def forget(self) -> None:
        self.steps = None

    def shout(self) -> None:
        raise ValueError("\udc80" + "x" * 10**6)


class Echo(BaseWorkload):
    """Answers who it is, and counts."""

    def setup(self) -> None:
        self.calls = 0
        self.setups = getattr(self, "setups", 0) + 1
        self.inside = 0
        self.most = 0
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.version = 3

    def who(self) -> tuple[int, int]:
        return self.rank, self.context.incarnation

    def add(self, one: int, two: int = 0) -> int:
        self.calls += 1
        return one + two

    def words(self, **words: Any) -> dict[str, Any]:
        return words

    def offered(self, item: int, *, step: int) -> tuple[int, int]:
        return item, step

    def double(self, items: list[int], times: int = 2) -> list[int]:
        self.report_progress()
        return [item * times for item in items]

    def one(self, item: int) -> int:
        return item * 10

    def hold(self) -> str:
        """Stays inside until the gate opens; `most` is how many were inside at once."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        self.gate.wait(GENEROUS_S)
        self.inside -= 1
        return "held"

    @operator(control=True)
    def beside(self, *, step: int = 0) -> tuple[str, int]:
        return "beside", step

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        if buffer == b"damaged":
            raise ValueError("damaged")
        self.loaded = manifest["version"]
        return self.loaded

    def served(self) -> int:
        return self.loaded

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def leave(self, code: int) -> None:
        raise SystemExit(code)

    def no_peer(self, text: str) -> None:
        raise RuntimeError(text)

    def unsendable(self) -> Any:
        return threading.Lock()

    def parse(self, text: str) -> Any:
        import json

        return json.loads(text)


class Broken(BaseWorkload):
    def setup(self) -> None:
        raise OSError("no such model")


class Untidy(BaseWorkload):
    def teardown(self) -> None:
        raise OSError(f"cannot be closed, job_ends={self.context.job_ends}")


class Plain:
    """Inherits nothing."""

    world_size = "mine"

    def fit(self) -> dict[str, Any]:
        return {"answer": self.config["key"], "rank": self.rank, "role": self.role}  # type: ignore[attr-defined]

    def place(self) -> tuple[Any, Any]:
        return self.local_rank, self.world_size  # type: ignore[attr-defined]


NOT_A_CLASS = 5


def long_reward(prompt: str, completion: str, meta: Any) -> float:
    """A user's function, called by a class of Gyre's."""
    raise ZeroDivisionError("no tokens")


class Cluster:
    """Vertices of role `echo`, a membership of them, and a handle on the role."""

    def __init__(self, count: int, *, timeout_s: float = GENEROUS_S, term: int = 1) -> None:
        self.membership = Membership()
        self.moments = Moments()
        self.vertices: dict[str, InProcessVertex] = {}
        self.everything: list[InProcessVertex] = []
        self.transport = InProcessTransport(self._find, term)
        self.count = count
        self.serial = 0
        self.gate = threading.Event()
        self.gate.set()
        self.start(range(count))
        self.handle = RoleHandle("echo", self.membership, self.transport, timeout_s=timeout_s, owner=self)

    def wait_while_paused(self) -> None:
        self.gate.wait()

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _find(self, vertex: str, incarnation: int) -> InProcessVertex | None:
        found = self.vertices.get(vertex)
        return found if found is not None and found.host.incarnation == incarnation else None

    def start(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            name = f"echo-{rank}"
            known = self.vertices.get(name)
            incarnation = known.host.incarnation + 1 if known is not None else 1
            vertex = InProcessVertex(InProcessHost(name, incarnation, moments=self.moments))
            bound = binding(vertex=name, incarnation=incarnation, world_size=self.count)
            assert vertex.host.bind(EPOCH, bound)[0] == "ok"
            self.vertices[name] = vertex
            self.everything.append(vertex)
        self.announce()

    def announce(self) -> None:
        self.serial += 1
        running = {name: vertex.host.incarnation for name, vertex in self.vertices.items() if not vertex.dead}
        self.membership.announce(self.serial, running, {"echo": self.count})

    def workload(self, rank: int) -> Echo:
        found: Echo = self.vertices[f"echo-{rank}"].host._workload
        return found

    def close(self) -> None:
        self.gate.set()
        self.transport.close()
        for vertex in self.everything:
            if isinstance(vertex.host._workload, Echo):
                vertex.host._workload.gate.set()
            vertex.kill()


def script(folder: Path) -> Path:
    """A class in a file of the user's."""
    path = folder / "my_script.py"
    path.write_text("class Mine:\n    def who(self):\n        return 'mine', self.config['key']\n")
    return path
