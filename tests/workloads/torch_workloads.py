"""Small torch workloads for the tests in this folder: bound and set up, with scored groups to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload, WorkloadContext
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.errors import MicroBatchMismatch
from gyre.workloads.learner.learner import BaseLearner
from gyre.workloads.tasks.arithmetic import ArithmeticTask
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.rollout import TorchRollout

CONFIG: dict[str, Any] = {
    "seed": 11,
    "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "max_positions": 32},
    "task": {"digits": 2, "zero_padded": False},
    "sampling": {"n": 4, "max_new_tokens": 4, "temperature": 0.7},
    "optim": {"lr": 1e-3},
    "critic": {"optim": {"lr": 1e-3}},
    "warm_start": {"max_steps": 4, "batch": 16, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
    "collective_timeout_s": 20.0,
}


def bind(workload: BaseWorkload, config: dict[str, Any] | None = None, **context: Any) -> Any:
    fields = {"job": "j", "role": "role", "rank": 0, "world_size": 1, "config": config or CONFIG, **context}
    workload.context = WorkloadContext(**fields)
    workload.setup()
    return workload


def rolled_out(actor: TorchActor, start: int, count: int, version: int = 0) -> list[Group]:
    """Groups `start..` sampled from the actor's weights, with rewards that differ within every group."""
    rollout = bind(TorchRollout(), actor.config)
    rollout.load_weights(*actor.export_weights(version=version))
    groups = rollout.generate(ArithmeticTask(actor.config).prompts(start, count), step=actor.step + 1)
    for group in groups:
        for index, sample in enumerate(group.samples):
            sample.reward = float((index + group.id) % 3 == 0)
    return groups


def train_as_peer(
    rank: int, world_size: int, port: int, shares: list[list[list[list[Group]]]], group_ids: list[list[int]]
) -> dict[str, Any]:
    """One rank of a gang, in a process of its own: warm start, then a step for each entry of `shares[rank]`, which
    is this rank's micro-batches. Ends with a step whose micro-batches disagree, and reports how that was refused."""
    actor = bind(TorchActor(), rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port)
    try:
        warm = actor.warm_start()
        metrics = []
        for step, (micro_batches, ids) in enumerate(zip(shares[rank], group_ids, strict=True), start=1):
            actor.begin(step)
            for index, groups in enumerate(micro_batches):
                actor.accumulate(groups, step=step, index=index)
            metrics.append(actor.apply(step=step, indices=len(micro_batches), group_ids=ids))
        weights = {name: p.detach().numpy().copy() for name, p in actor.backend.model.named_parameters()}
        state = actor.state()
        step = len(shares[rank]) + 1
        if rank == 0:
            actor.accumulate([], step=step, index=0)
        try:
            actor.apply(step=step, indices=1, group_ids=[])
            refusal = "none"
        except MicroBatchMismatch as error:
            refusal = error.code
        return {"warm": warm, "metrics": metrics, "weights": weights, "state": state, "refusal": refusal}
    finally:
        actor.teardown()


def gradient_of(learner: BaseLearner, groups: list[Group]) -> tuple[Any, Tally]:
    """The flat gradient of the summed loss, in passes as they are set, and its tally. Nothing is accumulated then."""
    tally = learner.gradient(groups, learner.rows(groups)).plus(learner._finish_gradient())
    backend: Any = learner.backend
    found = backend.gradient
    learner.begin(learner.step + 1)
    return found, tally


PLAIN_GRADIENT: dict[str, Any] = {
    "optim": {"lr": 1e4, "beta1": 0.0, "beta2": 0.0, "eps": 1e4, "clip_norm": 1e9, "warmup_steps": 0}
}
"""AdamW's step is then the negative gradient, to a part in 10^4 of it: `lr * g / (|g| + eps)`."""


def step_of(
    actor: TorchActor, micro_batches: list[list[Group]], ids: list[int]
) -> tuple[Any, dict[str, Any]]:
    """What one optimizer step adds to the weights, float64 `[parameters]`, and the step's metrics."""

    def flat() -> Any:
        return np.concatenate([p.detach().double().numpy().ravel() for p in actor.backend.model.parameters()])

    before = flat()
    actor.begin(1)
    for index, groups in enumerate(micro_batches):
        actor.accumulate(groups, step=1, index=index)
    metrics = actor.apply(step=1, indices=len(micro_batches), group_ids=ids)
    return flat() - before, metrics


def steps_as_peer(
    rank: int,
    world_size: int,
    port: int,
    path: Path,
    config: dict[str, Any],
    shares: list[list[list[list[Group]]]],
    ids: list[int],
) -> list[tuple[Any, dict[str, Any]]]:
    """One rank of a gang, in a process of its own: `step_of` for each entry of `shares[rank]`, from the
    same weights each time."""
    where = {"master_addr": "127.0.0.1", "master_port": port}
    actor = bind(TorchActor(), config, rank=rank, world_size=world_size, **where)
    try:
        found = []
        for micro_batches in shares[rank]:
            actor.restore(path)
            found.append(step_of(actor, micro_batches, ids))
        return found
    finally:
        actor.teardown()
