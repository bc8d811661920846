"""A GRPO job of whole numbers: every role's protocol, and a digest in which any token, order or repetition shows.

The policy is four 64-bit numbers. What is generated is a hash of them and of the prompt; a gradient is a sum of
hashes of what was generated, scored and referred to. Sums of whole numbers are exact, so two runs that trained
the same groups, with the same samples, in the same steps, end with the same digest, and any others do not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.testing.in_process import collective_of
from gyre.workloads.base import BaseWorkload, WorkloadContext, operator
from gyre.workloads.learner.errors import NotFinite
from gyre.workloads.memory.choice import smaller
from gyre.workloads.trainer.loop import GraphTrainer

MASK = (1 << 64) - 1
SIZE = 4
SAMPLES, TOKENS = 2, 3


def mix(*values: int) -> int:
    """A hash of whole numbers in which their order counts."""
    found = 0x9E3779B97F4A7C15
    for value in values:
        found = ((found ^ (value & MASK)) * 0xBF58476D1CE4E5B9) & MASK
        found ^= found >> 29
    return found


def packed(weights: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in weights)


def toy_spec(**changes: Any) -> dict[str, Any]:
    """Two actor ranks, two rollouts, a reward and a reference; `run` and `roles` are merged with the defaults."""
    here = "tests.workloads.toy_policy"
    run = {
        "steps": 5,
        "prompts_per_step": 8,
        "groups_per_firing": 2,
        "groups_per_micro_batch": 4,
        "checkpoint_every": 2,
        "evaluate_every": 2,
        "held_out": 3,
        "data": f"{here}:ToyData",
        "call_timeout_s": 20.0,
        **changes.pop("run", {}),
    }
    roles = {
        "actor": {"entrypoint": f"{here}:ToyActor", "total": 2},
        "rollout": {"entrypoint": f"{here}:ToyRollout", "total": 2},
        "reward": {"entrypoint": f"{here}:ToyReward"},
        "reference": {"entrypoint": f"{here}:ToyReference"},
        **changes.pop("roles", {}),
    }
    return {
        "name": "toy",
        "recipe": "grpo",
        "roles": {name: role for name, role in roles.items() if role is not None},
        "run": run,
        **changes,
    }


class ToyData:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def prompt(self, index: int) -> Group:
        return Group(index, np.array([index, index * 7 + 1], dtype=np.int32), {"answer": index % 5})

    def held_out(self, count: int) -> list[Group]:
        return [
            Group(-1 - index, np.array([index], dtype=np.int32), {"answer": index}) for index in range(count)
        ]


class ToyActor(BaseWorkload):
    """The very protocol of TorchActor, with its refusals."""

    def setup(self) -> None:
        self.peers = collective_of(self.context)
        self.weights = [mix(index) for index in range(SIZE)]
        self.step = 0
        self.trained: set[int] = set()
        self.warm: dict[str, Any] | None = None
        self.metrics: dict[str, Any] = {}
        self._forget(1)

    def _forget(self, step: int) -> None:
        self.pending_step = step
        self.records: dict[int, dict[str, Any]] = {}
        self.pending: set[int] = set()
        self.versions: list[int] = []
        self.gradient = [0] * SIZE

    def _is_applied(self, step: int) -> bool:
        if step > self.step + 1:
            raise RuntimeError(f"step {step} was called while the last applied step is {self.step}")
        return step <= self.step

    def _refuse_trained(self, ids: list[int]) -> None:
        again = [group_id for group_id in ids if group_id in self.trained]
        if again or len(set(ids)) != len(ids):
            raise RuntimeError(f"groups {again or ids} would be trained twice")

    @operator(kind="control")
    def warm_start(self) -> dict[str, Any]:
        if self.warm is None and self.step == 0:
            mine = [mix(value, 1) for value in self.weights] if self.rank == 0 else None
            self.weights = list(self.peers.exchange(self.rank, mine)[0])
            self.warm = {"steps": 1}
        return self.warm or {}

    @operator(kind="control")
    def begin(self, step: int) -> dict[str, Any]:
        if self._is_applied(step):
            return {"already_applied": True}
        self._forget(step)
        return {"step": step}

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        if self._is_applied(step):
            return {"already_applied": True}
        if index in self.records:
            return self.records[index]
        ids = [group.id for group in groups]
        self._refuse_trained([*self.pending, *ids])
        self.report_progress(step=step)
        for group in groups:
            for number, sample in enumerate(group.samples):
                facts = [
                    group.id,
                    number,
                    index,
                    *sample.token_ids.tolist(),
                    *sample.extras.get("reference", np.zeros(1)).tolist(),
                    int(sample.reward if sample.reward is not None else -1),
                ]
                self.versions += [run.version for run in sample.versions]
                self.gradient = [
                    (value + mix(at, *(int(fact) for fact in facts))) & MASK
                    for at, value in enumerate(self.gradient)
                ]
        self.pending |= set(ids)
        self.records[index] = {"index": index, "groups": len(groups)}
        return self.records[index]

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        if self._is_applied(step):
            return self.metrics if step == self.step else {"already_applied": True}
        self._refuse_trained(group_ids)
        facts = self.peers.exchange(
            self.rank, (self.gradient, sorted(self.pending), sorted(self.records), self.versions)
        )
        for _, _, records, _ in facts:
            if records != list(range(indices)):
                raise RuntimeError(f"micro-batches {records} of {indices} were accumulated")
        if sorted(group_id for _, pending, _, _ in facts for group_id in pending) != sorted(group_ids):
            raise RuntimeError("other groups were accumulated than are to be applied")
        versions = [version for _, _, _, seen in facts for version in seen]
        total = [
            sum(column) & MASK for column in zip(*(gradient for gradient, _, _, _ in facts), strict=True)
        ]
        self.weights = [
            (value * 6364136223846793005 + add + step) & MASK
            for value, add in zip(self.weights, total, strict=True)
        ]
        self.step = step
        self.trained |= set(group_ids)
        self.metrics = {"step": step, "oldest": min(versions), "newest": max(versions), "reward_mean": 0.5}
        self._forget(step + 1)
        return self.metrics

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        buffer = packed(self.weights)
        manifest = {
            "version": version,
            "step": self.step,
            "checksum": f"{mix(*self.weights):016x}",
            "size_bytes": len(buffer),
        }
        return manifest, buffer

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        return {"step": self.step, "trained": sorted(self.trained), "digest": f"{mix(*self.weights):016x}"}

    def checkpoint(self, path: Path) -> None:
        content = {
            "weights": self.weights,
            "step": self.step,
            "trained": sorted(self.trained),
            "metrics": self.metrics,
            "warm": self.warm,
        }
        (path / f"rank_{self.rank}.json").write_text(json.dumps(content if self.rank == 0 else {}))

    def restore(self, path: Path) -> None:
        content = json.loads((path / "rank_0.json").read_text())
        self.weights, self.step = content["weights"], content["step"]
        self.trained, self.metrics, self.warm = (
            set(content["trained"]),
            content["metrics"],
            content["warm"],
        )
        self._forget(self.step + 1)


class ToyRollout(BaseWorkload):
    def setup(self) -> None:
        self.version: int | None = None
        self.weights: list[int] = []

    def _tokens(self, group_id: int, number: int) -> np.ndarray:
        ids = [mix(*self.weights, group_id, number, at) % 1000 for at in range(TOKENS)]
        return np.array(ids, dtype=np.int32)

    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        assert self.version is not None
        self.report_progress(step=step)
        return [
            replace(
                group,
                samples=[
                    Sample(
                        self._tokens(group.id, number),
                        np.zeros(TOKENS, dtype=np.float32),
                        (VersionRun(self.version, 0, TOKENS),),
                    )
                    for number in range(SAMPLES)
                ],
            )
            for group in groups
        ]

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        weights = [int.from_bytes(buffer[at : at + 8], "little") for at in range(0, len(buffer), 8)]
        if f"{mix(*weights):016x}" != manifest["checksum"]:
            raise RuntimeError("the weights came damaged")
        if self.version is not None and manifest["version"] < self.version:
            raise RuntimeError(f"version {manifest['version']} is older than {self.version}")
        self.weights, self.version = weights, manifest["version"]
        return self.version

    @operator
    def evaluate(self, groups: list[Group]) -> dict[str, Any]:
        right = sum(int(self._tokens(group.id, 0)[0]) % 2 for group in groups)
        return {"accuracy": right / len(groups), "count": len(groups), "version": self.version}


class ToyReward(BaseWorkload):
    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for sample in group.samples:
                sample.reward = float(int(sample.token_ids.sum()) % 5 == group.meta["answer"])
        return groups


class ToyReference(BaseWorkload):
    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for sample in group.samples:
                sample.extras["reference"] = sample.token_ids * 3 + 1
        return groups


def digests_by_hand(steps: int, batch: int, micro: int) -> dict[int, str]:
    """Each step's digest, by a plain loop over one worker of each role: no graph, no trainer, no ledger."""
    actor, rollout, reward, reference = ToyActor(), ToyRollout(), ToyReward(), ToyReference()
    for role, workload in (("actor", actor), ("rollout", rollout)):
        workload.context = WorkloadContext(job="by-hand", role=role, rank=0, world_size=1)
        workload.setup()
    actor.warm_start()
    rollout.load_weights(*actor.export_weights(version=0))
    found = {}
    for step in range(1, steps + 1):
        groups = [ToyData({}).prompt(index) for index in range((step - 1) * batch, step * batch)]
        groups = reference.logprobs(reward.score(rollout.generate(groups, step=step)))
        for index in range(batch // micro):
            actor.accumulate(groups[index * micro : (index + 1) * micro], step=step, index=index)
        actor.apply(step=step, indices=batch // micro, group_ids=[group.id for group in groups])
        manifest, buffer = actor.export_weights(version=step)
        rollout.load_weights(manifest, buffer)
        found[step] = manifest["checksum"]
    return found


class ForgetfulReward(ToyReward):
    """Forgets to return what it scored."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        super().score(groups)
        return None  # type: ignore[return-value]


class BlindReward(ToyReward):
    """Returns the groups as they came: no sample has a reward."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        return groups


class NanActor(ToyActor):
    """Its loss is not a number."""

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        return {
            **super().apply(step=step, indices=indices, group_ids=group_ids),
            "loss": float("nan"),
            "grad_norm": float("inf"),
        }


class StubbornRollout(ToyRollout):
    """The third load fails, as a damaged transfer does."""

    loads = 0

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        self.loads += 1
        if self.loads == 3:
            raise RuntimeError("the weights came damaged")
        return super().load_weights(manifest, buffer)


class OtherPrompts(GraphTrainer):
    """A user's subclass with prompts of its own."""

    def prompt(self, index: int) -> Group:
        return super().prompt(index + 1000)


class NotFiniteOnce(ToyActor):
    """The gradient of the second step is not finite."""

    REFUSED: ClassVar[frozenset[int]] = frozenset((2,))

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int], skip: bool = False) -> dict[str, Any]:
        if step == self.step + 1 and skip:
            self.step, self.metrics = step, {"step": step, "skipped": 1}
            self._forget(step + 1)
            return self.metrics
        if step == self.step + 1 and step in self.REFUSED:
            raise NotFinite(f"the gradient of step {step} has norm nan.", hint="Lower optim.lr.")
        return super().apply(step=step, indices=indices, group_ids=group_ids)


class NeverFinite(NotFiniteOnce):
    REFUSED: ClassVar[frozenset[int]] = frozenset(range(2, 100))


class HungryActor(ToyActor):
    """From step 2 on its passes fit into memory once they are a quarter of what they were."""

    @operator(kind="control")
    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        self.pass_tokens = 4096 >> halved
        return super().begin(step) | {"pass_tokens": self.pass_tokens}

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        if step >= 2 and self.pass_tokens > 1024:
            raise MemoryError("a pass does not fit")
        return super().accumulate(groups, step=step, index=index)


class SparingActor(ToyActor):
    """From step 2 on its passes fit into memory once their activations are computed again."""

    @operator(kind="control")
    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        self.size = smaller({"pass_tokens": 4096, "recompute": False}, halved)
        return super().begin(step) | self.size

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        if step >= 2 and not self.size["recompute"]:
            raise MemoryError("a pass does not fit")
        return super().accumulate(groups, step=step, index=index)


class BrokenApply(ToyActor):
    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        raise ValueError("the optimizer is broken")
