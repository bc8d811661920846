"""Megatron's own checkpoints, `megatron.core.dist_checkpointing`, below `state/` of a checkpoint's folder, with each
rank's random state in `rank_00000.pt`.

They are written with the optimizers of Transformer Engine and Apex, and read wherever an older Gyre wrote them.

Writing runs on a thread of this process, for Megatron's own way, forked processes that report through a spawned one, is
no good in a process that has threads and a GPU. Planning, and the last step, are collectives of all ranks.

Megatron 0.16.1 cannot load the state of its distributed optimizer where that is torch's AdamW, which it is without
Transformer Engine or Apex; `parts.AdamState` and `_step_stays` say what it takes. This module must not know what a step
is made of, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gyre.workloads.megatron.checkpoints.parts import AdamState
from gyre.workloads.megatron.policy import MegatronPolicy

_STATE = "state"

Seam = Callable[[], AbstractContextManager[Any]]


def begin_write(
    policy: MegatronPolicy, seam: Seam, path: Path
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copy what is to be written below `path`. Returns what writes it, on any thread, and what all ranks call together
    when all have written. A collective of all ranks."""
    state = path / _STATE
    state.mkdir(exist_ok=True)
    filesystem_async._results_queue = queue.Queue()  # else a process is spawned to hold one
    AdamState(policy).complete()
    with seam():
        request = dist_checkpointing.save(
            sharded_state(policy, is_loading=False), str(state), async_sharded_save=True
        )
        buckets = request.preload_fn() if request.preload_fn is not None else []
    if policy.device.type == "cpu":
        buckets = [(file, key, (texts, _copied(tensors))) for file, key, (texts, tensors) in buckets]
    finish = list(request.finalize_fns)
    transforms = request.async_fn.args[0] if isinstance(request.async_fn, partial) else []
    random_state = _random_state()
    rank = policy.ranks.rank

    def write() -> None:
        with open(path / f"rank_{rank:05d}.pt", "wb") as file:
            torch.save(random_state, file)
            file.flush()
            os.fsync(file.fileno())
        if buckets:
            filesystem_async._results_queue.put(_written(buckets, transforms))

    def finish_all() -> None:
        with seam():
            for one in finish:
                one()

    return write, finish_all


def _written(buckets: list[Any], transforms: list[Any]) -> dict[int, Any]:
    """Write the files one after another, and return Megatron's record of what is where in them."""
    results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    counter: queue.Queue[int] = queue.Queue()
    found = {}
    for index, bucket in enumerate(buckets):
        counter.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, counter, True)
        _, found[index] = results.get()
        if isinstance(found[index], Exception):
            raise found[index]
    return found


def restore(policy: MegatronPolicy, seam: Seam, path: Path) -> None:
    """Load weights, optimizer and random state. A collective of all ranks."""
    AdamState(policy).complete()
    with seam(), torch.no_grad(), _step_stays():
        found = dist_checkpointing.load(sharded_state(policy, is_loading=True), str(path / _STATE))
        policy.module.load_state_dict(found["model"])
        policy.optimizer.load_state_dict(found["optimizer"])
        AdamState(policy).unshare_step()
    mine = path / f"rank_{policy.ranks.rank:05d}.pt"
    if mine.exists():
        _take_random_state(torch.load(mine, weights_only=True))


def load_weights(policy: MegatronPolicy, seam: Seam, path: Path) -> None:
    """Load the weights of the checkpoint at `path`, written in whatever layout, and nothing else of it: the policy
    need not have an optimizer. A collective of all ranks."""
    with seam(), torch.no_grad():
        model = policy.module.sharded_state_dict(metadata=_metadata())
        found = dist_checkpointing.load({"model": model}, str(path / _STATE))
        policy.module.load_state_dict(found["model"])


def sharded_state(policy: MegatronPolicy, *, is_loading: bool) -> dict[str, Any]:
    """Weights and optimizer as Megatron describes them to itself: which rank has which part of what."""
    metadata = _metadata()
    model = policy.module.sharded_state_dict(metadata=metadata)
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _metadata() -> dict[str, Any]:
    return {
        # Of Megatron's formats the one that goes from any layout to any other, and that keeps the optimizer's step.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


# -- what Megatron lacks ------------------------------------------------------------------------------


@contextmanager
def _step_stays() -> Iterator[None]:
    """Megatron sets every entry of a parameter's state from what was loaded, and leaves the step out of what it loads:
    the step was set before, from the groups."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if "step" not in tensors:
            known = self._get_main_param_and_optimizer_states(parameter)
            if "step" in known:
                tensors = {**tensors, "step": known["step"]}
        original(self, parameter, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original


# -- small parts --------------------------------------------------------------------------------------


def _copied(tensors: list[tuple[Any, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
    """Megatron hands out the very weights, which the next step changes; from a GPU they are copies."""
    return [(item, tensor.detach().clone()) for item, tensor in tensors]


def _random_state() -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _take_random_state(found: dict[str, Any]) -> None:
    torch.set_rng_state(found["cpu"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
