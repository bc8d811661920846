"""Checkpoints of the actor by `megatron.core.dist_checkpointing`: written beside the training, loaded in any layout.

A checkpoint is a folder that its owner (the trainer) makes visible by renaming it when all of it is written:

    actor.json           step, trained ids, metrics, the model and its weights' digest: written last, by the first rank
    rank_00000.pt …      each rank's random state
    state/               weights and optimizer, as Megatron shards them: metadata.json, .metadata, common.pt, *.distcp

Invariants:
- *written from copies*: what is written is what the weights were when the write began, whatever is trained meanwhile;
- *last is whole*: `actor.json` is there only when every rank's part is on the disk;
- *what was written comes back*: the digest of the loaded weights is compared with the one that was written.

Writing runs on a thread of this process, for Megatron's own way, forked processes that report through a spawned one, is
no good in a process that has threads and a GPU. Planning, and the last step, are collectives of all ranks.

Megatron 0.16.1 cannot load the state of its distributed optimizer where that is torch's AdamW, which it is without
Transformer Engine or Apex; `AdamState` says what it takes. This module must not know what a step is made of, and must
not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gyre.workloads.megatron.model.parallel import Ranks
from gyre.workloads.megatron.policy import MegatronPolicy
from gyre.workloads.torch.errors import CheckpointMismatch

FORMAT = 1
_STATE = "state"
_METADATA = "actor.json"


class CheckpointWriter:
    """One checkpoint on its way to the disk. `begin` and `is_written` are collectives of all ranks."""

    def __init__(self, policy: MegatronPolicy, seam: Callable[[], AbstractContextManager[Any]]) -> None:
        self._policy = policy
        self._ranks: Ranks = policy.ranks
        self._seam = seam
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._finish: list[Callable[[], None]] = []
        self._path = Path()
        self._metadata: dict[str, Any] = {}

    def begin(self, path: Path, metadata: dict[str, Any]) -> None:
        """Copy what is to be written, and start to write it below `path`, which is there and empty. `metadata` is what
        the first rank's `actor.json` will hold. One at a time: who begins another has seen this one written."""
        assert self._thread is None, "a checkpoint is being written"
        self._path, self._metadata = path, metadata
        state = path / _STATE
        state.mkdir(exist_ok=True)
        filesystem_async._results_queue = queue.Queue()  # else a process is spawned to hold one
        AdamState(self._policy).complete()
        with self._seam():
            request = dist_checkpointing.save(
                sharded_state(self._policy, is_loading=False), str(state), async_sharded_save=True
            )
            buckets = request.preload_fn() if request.preload_fn is not None else []
        if self._policy.device.type == "cpu":
            buckets = [(file, key, (texts, _copied(tensors))) for file, key, (texts, tensors) in buckets]
        self._finish = list(request.finalize_fns)
        transforms = request.async_fn.args[0] if isinstance(request.async_fn, partial) else []
        random_state = _random_state()
        self._error = None
        self._thread = threading.Thread(
            target=self._write, args=(buckets, transforms, random_state), name="gyre-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, buckets: list[Any], transforms: list[Any], random_state: dict[str, Any]) -> None:
        try:
            with open(self._path / f"rank_{self._ranks.rank:05d}.pt", "wb") as file:
                torch.save(random_state, file)
                file.flush()
                os.fsync(file.fileno())
            if buckets:
                filesystem_async._results_queue.put(_written(buckets, transforms))
        except Exception as error:  # told to whoever asks whether it is written
            self._error = error

    def is_written(self, *, wait: bool) -> bool:
        """Whether all ranks have written, and the folder is whole. With `wait`, when they have. Raises what went wrong
        on any of them, on all of them."""
        if self._thread is None:
            return True
        if wait:
            self._thread.join()  # ends with the disk's write; the caller's own deadline is above it
        writing, failed = self._ranks.sum([self._thread.is_alive(), self._error is not None])
        if writing:
            return False
        self._thread = None
        if failed:
            raise CheckpointMismatch(
                f"the checkpoint at {self._path} could not be written"
                + (f": {self._error}" if self._error is not None else " by another rank"),
                hint="See whether its disk is full.",
            ) from self._error
        with self._seam():
            for finish in self._finish:
                finish()
        self._finish = []
        if self._ranks.rank == 0:
            _write_json(self._path / _METADATA, {"format": FORMAT, **self._metadata})
        self._ranks.sum([0.0])  # nobody says "written" before the first rank has
        return True

    def abandon(self) -> None:
        """Let go of a checkpoint that nobody waits for. Its folder is not whole, and never will be."""
        if self._thread is not None:
            self._thread.join()  # it must not write into a folder that may be begun anew
            self._thread = None
        self._finish = []


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


def restore(
    policy: MegatronPolicy, seam: Callable[[], AbstractContextManager[Any]], path: Path
) -> dict[str, Any]:
    """Load weights and optimizer of the checkpoint at `path`, written in whatever layout, and return its metadata. A
    collective of all ranks. Raises CheckpointMismatch."""
    metadata = read_metadata(path)
    AdamState(policy).complete()
    with seam(), torch.no_grad(), _step_stays():
        found = dist_checkpointing.load(sharded_state(policy, is_loading=True), str(path / _STATE))
        policy.module.load_state_dict(found["model"])
        policy.optimizer.load_state_dict(found["optimizer"])
        AdamState(policy).unshare_step()
    mine = path / f"rank_{policy.ranks.rank:05d}.pt"
    if mine.exists():
        _take_random_state(torch.load(mine, weights_only=True))
    return metadata


def load_weights(policy: MegatronPolicy, seam: Callable[[], AbstractContextManager[Any]], path: Path) -> None:
    """Load the weights of the checkpoint at `path`, written in whatever layout, and nothing else of it: the policy
    need not have an optimizer. A collective of all ranks."""
    with seam(), torch.no_grad():
        model = policy.module.sharded_state_dict(metadata=_metadata())
        found = dist_checkpointing.load({"model": model}, str(path / _STATE))
        policy.module.load_state_dict(found["model"])


def begin_optimizer_anew(policy: MegatronPolicy) -> None:
    """It knows of no step, as before the first."""
    for one in policy.optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def read_metadata(path: Path) -> dict[str, Any]:
    """The content of `actor.json`. Raises CheckpointMismatch where there is none, or one of another format."""
    try:
        metadata: dict[str, Any] = json.loads((path / _METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointMismatch(
            f"there is no whole checkpoint at {path}: {error}.",
            hint="Is its disk there? If it is lost for good, run.lost_checkpoint: weights goes on without it.",
        ) from None
    if metadata.get("format") != FORMAT:
        raise CheckpointMismatch(f"{path} has format {metadata.get('format')}, this Gyre reads {FORMAT}.")
    return metadata


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


class AdamState:
    """torch's AdamW inside Megatron's optimizer.

    Megatron describes an optimizer by the state that it has, and a new one has none; it reads the step from the state
    of every parameter and gives all of them one and the same tensor back, which AdamW then counts up once for each.
    """

    def __init__(self, policy: MegatronPolicy) -> None:
        self._optimizers = [
            one.optimizer
            for one in policy.optimizer.chained_optimizers
            if isinstance(one.optimizer, torch.optim.AdamW)
        ]

    def _parameters(self) -> Iterable[tuple[dict[Any, Any], torch.Tensor]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer.state[parameter], parameter

    def complete(self) -> None:
        """Make a state of zeros where there is none; before the first step that is what it would be."""
        for state, parameter in self._parameters():
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    def unshare_step(self) -> None:
        for state, parameter in self._parameters():
            if "step" in state:
                state["step"] = state["step"].detach().clone().to(parameter.device)


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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    partial_ = path.with_suffix(".partial")
    with open(partial_, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial_.rename(path)
