"""Your own classes and your own loop: evolution strategies on a line, with no recipe and no model.

    gyre plan examples/custom_workload.py
    gyre run examples/custom_workload.py
    gyre run examples/custom_workload.py --set config.rounds=100 --name longer

`fit()` is the whole flow. What it calls on a role runs on every vertex of it, on one of them, or dealt out over
them; a vertex that dies in a call is replaced and called again.
"""

from __future__ import annotations

import random
from typing import Any

from gyre.api import RLJobBuilder
from gyre.workloads import BaseTrainer, BaseWorkload


class Explorer(BaseWorkload):
    """Tries points near the present one."""

    def explore(self, centre: float, turn: int) -> list[float]:
        # Drawn from the arguments alone: a call that is repeated on a replacement gives the same points.
        dice = random.Random(f"{self.config['seed']}/{turn}/{self.rank}")
        return [dice.gauss(centre, self.config["width"]) for _ in range(self.config["points"])]


class Judge:
    """Inherits nothing, and has no hooks; `config` and `rank` are there all the same."""

    config: dict[str, Any]

    def score(self, points: list[float]) -> list[float]:
        return [-abs(point - self.config["goal"]) for point in points]


class Climber(BaseTrainer):
    """Moves to the best point of every round."""

    def fit(self) -> dict[str, Any]:
        centre = 0.0
        for turn in range(1, self.config["rounds"] + 1):
            points = [point for found in self.explorer.explore(centre, turn) for point in found]
            scores = self.reward.score.scatter(points)
            best, centre = max(zip(scores, points, strict=True))
            self.report_progress(step=turn, steps=self.config["rounds"], reward=best)
            if self.runtime.should_stop:
                break
        print(f"arrived at {centre:.3f}")
        return {"centre": centre, "distance": -best}


job = (
    RLJobBuilder()
    .name("climb")
    .node_num(1)
    .device_per_node(8)
    .config({"seed": 0, "goal": 3.0, "width": 0.5, "points": 8, "rounds": 30})
    .trainer(Climber)
    .role("explorer", Explorer)
    .total(2)
    .elastic(1, 4)
    .reward(Judge)
    .total(2)
)
