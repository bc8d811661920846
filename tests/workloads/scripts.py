"""Trainers with a `fit()` of their own, for `test_runtime`."""

from __future__ import annotations

import threading
from typing import Any

from gyre.testing.in_process import collective_of
from gyre.workloads.base import BaseTrainer, BaseWorkload
from tests.waits import GENEROUS_S

HERE = "tests.workloads.scripts"


def script_spec(trainer: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "script",
        "roles": {
            "trainer": {"entrypoint": f"{HERE}:{trainer}"},
            "worker": {"entrypoint": f"{HERE}:Worker", "total": 2},
        },
        "config": {"text": "bad luck"},
        "run": {"call_timeout_s": GENEROUS_S},
        **changes,
    }


class Worker(BaseWorkload):
    def setup(self) -> None:
        self.calls = 0

    def work(self, item: int) -> int:
        self.calls += 1
        return item + self.rank

    def fail(self) -> None:
        raise ValueError(self.config["text"])


class Sum(BaseTrainer):
    def fit(self) -> dict[str, Any]:
        self.runtime.report("StepCompleted", step=1, version=1, metrics={})
        return {"sum": sum(self.worker.work(10)), "role": self.role}


class PlainSum:
    """Inherits nothing; its handles are plain attributes."""

    worker: Any

    def fit(self) -> int:
        return sum(self.worker.work(10))


class Mistaken(BaseTrainer):
    def fit(self) -> None:
        self.wroker.work(1)


class Raising(BaseTrainer):
    def fit(self) -> None:
        raise KeyError("loss")


class Careless(BaseTrainer):
    """Lets a vertex's exception through."""

    def fit(self) -> None:
        self.worker.fail()


class Odd(BaseTrainer):
    def fit(self) -> dict[Any, Any]:
        return {1: float("nan"), "set": {2}, "list": (1, [2.5, None, True])}


class Patient(BaseTrainer):
    """Works until it is told to stop."""

    def fit(self) -> dict[str, Any]:
        steps = 0
        while not self.runtime.should_stop:
            self.worker.work(steps)
            steps += 1
            self.runtime.report("StepCompleted", step=steps, version=steps, metrics={})
        return {"steps": steps}


class Quitter(BaseTrainer):
    def fit(self) -> None:
        raise SystemExit(3)


class Nothing(BaseTrainer):
    pass


class Thinker(BaseTrainer):
    """Computes for itself, then waits for others, at its own word."""

    def fit(self) -> None:
        type(self).thinking.wait(GENEROUS_S)
        self.worker.work(1)

    thinking = threading.Event()


class Meeting(Worker):
    """Its ranks meet in each call."""

    def setup(self) -> None:
        super().setup()
        self.peers = collective_of(self.context)

    def work(self, item: int) -> int:
        self.peers.exchange(self.rank, None)
        return super().work(item)
