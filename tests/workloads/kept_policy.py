"""Toy actors that leave their state with something that outlives them: their machine's memory, or the instances."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from gyre.workloads.base import operator
from gyre.workloads.gang.weight_copy import WeightCopies, WeightCopy
from gyre.workloads.learner.errors import CheckpointMismatch
from tests.workloads.toy_policy import ToyActor

KEPT: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
"""The machine's memory: states by job and rank, and by step."""

SERVED: dict[str, dict[int, list[int]]] = {}
"""What instances have: weights by job, and by version."""


class ServedCopies(WeightCopies):
    """Copies of what instances have by `SERVED`."""

    def newest(self) -> WeightCopy | None:
        versions = SERVED.get(str(self.directory), {})
        return WeightCopy(max(versions), "", ("h:1",), max(versions)) if versions else None


class DivergingActor(ToyActor):
    """Whoever comes after the first trains another step 3 than that one did."""

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        metrics = super().apply(step=step, indices=indices, group_ids=group_ids)
        if step == 3 and self.context.incarnation > 1:
            self.weights[0] ^= 1
        return metrics


class KeepingActor(ToyActor):
    """It keeps each step's state in memory, and instances get its weights."""

    @property
    def mine(self) -> tuple[str, int]:
        return str(self.context.directory), self.rank

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        metrics = super().apply(step=step, indices=indices, group_ids=group_ids)
        KEPT.setdefault(self.mine, {})[self.step] = {
            "weights": list(self.weights),
            "trained": set(self.trained),
            "metrics": self.metrics,
            "warm": self.warm,
        }
        return metrics

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        return {**super().state(), "memory": True}

    @operator(kind="control")
    def restore_from_memory(self, *, newer_than: int, at_most: int) -> int | None:
        directory = str(self.context.directory)
        held = [KEPT.get((directory, rank), {}) for rank in range(self.world_size)]
        able = [step for step in held[0] if newer_than < step <= at_most and all(step in one for one in held)]
        if not able:
            return None
        self.step = max(able)
        for name, value in held[self.rank][self.step].items():
            setattr(self, name, type(value)(value))
        self._forget(self.step + 1)
        return self.step

    @operator(kind="control")
    def forget_memory(self) -> None:
        KEPT.pop(self.mine, None)

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        SERVED.setdefault(str(self.context.directory), {})[version] = list(self.weights)
        return super().export_weights(version=version)

    @operator(kind="weights")
    def fetch_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]]
    ) -> tuple[str, str]:
        return "first:1", ""

    @operator(kind="control")
    def restore_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]], trained: list[list[int]]
    ) -> None:
        assert sources == [("first:1", ""), ("h:1", "")]
        self.weights, self.step = list(SERVED[str(self.context.directory)][version]), version
        self.trained = {group_id for start, end in trained for group_id in range(start, end)}
        assert self.trained == set(range(8 * version)), "eight prompts a step, in order"
        self.metrics, self.warm = {}, {"steps": 0}
        self._forget(version + 1)


class ServingActor(KeepingActor):
    """The same without memory."""

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        return ToyActor.state(self)


class RefusingActor(ToyActor):
    """Its checkpoint of step 4 looks whole, and is not."""

    @operator(kind="control")
    def restore(self, path: Path) -> None:
        if path.name == "step_00000004":
            raise CheckpointMismatch(f"{path}: a bit is wrong")
        super().restore(path)


class SlowWriter(ToyActor):
    """It writes its checkpoint when it is asked for the second time whether that is written."""

    def setup(self) -> None:
        super().setup()
        self._path: Path | None = None
        self._asked = 0
        self._copy: dict[str, Any] = {}

    @operator(kind="control")
    def checkpoint(self, path: Path, *, background: bool = False) -> bool:
        self._path, self._asked = path, 0
        self._copy = {name: getattr(self, name) for name in ("weights", "step", "trained", "metrics", "warm")}
        self._copy = {name: copy(value) for name, value in self._copy.items()}
        return background or not self.checkpoint_written(wait=True)

    @operator(kind="control")
    def checkpoint_written(self, *, wait: bool) -> bool:
        self._asked += 1
        if self._path is not None and (wait or self._asked > 1):
            now = {name: getattr(self, name) for name in self._copy}
            vars(self).update(self._copy)
            super().checkpoint(self._path)
            vars(self).update(now)
            self._path = None
        return self._path is None
