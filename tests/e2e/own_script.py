"""A user's script: classes and job in one file, run as `python own_script.py`."""

from __future__ import annotations

from gyre.api import RLJobBuilder
from gyre.workloads import BaseTrainer


class Rollout:
    rank: int

    def generate(self, n: int) -> list[int]:
        return [self.rank] * n


class Trainer(BaseTrainer):
    def fit(self) -> list[list[int]]:
        found: list[list[int]] = self.rollout.generate(3)
        return found


if __name__ == "__main__":
    handle = RLJobBuilder().trainer(Trainer).rollout(Rollout).total(2).submit("test")
    print(handle.wait(60)["job"]["result"]["value"])
