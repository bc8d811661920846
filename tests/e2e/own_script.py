"""A user's script: classes and job in one file, run as `python own_script.py`."""

from __future__ import annotations

from gyre.api import RLJobBuilder
from gyre.workloads import BaseTrainer, BaseWorkload


class Rollout:
    rank: int

    def generate(self, n: int) -> list[int]:
        return [self.rank] * n


class Actor(BaseWorkload):
    def where(self) -> list[int]:
        return [self.rank, self.local_rank]


class Trainer(BaseTrainer):
    def fit(self) -> dict[str, list[list[int]]]:
        return {"generated": self.rollout.generate(3), "places": self.actor.where()}


if __name__ == "__main__":
    job = RLJobBuilder().trainer(Trainer).rollout(Rollout).total(2).actor(Actor).total(2).per_node(2)
    handle = job.submit("test")
    result = handle.wait(60)["job"]["result"]
    print(result["generated"], result["places"], handle.notes)
