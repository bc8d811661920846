"""The actor's ranks as Megatron's groups: tensor, pipeline and data parallel.

Ranks that differ in their tensor or pipeline place alone work on the same samples: they are a *replica*. The trainer
deals groups out to ranks without knowing of that, so the ranks of a replica put their shares together
(`MegatronRanks.pool_shares`).

Invariant: *one actor a process*: Megatron keeps its groups in globals. See those of `gyre.workloads.gang.world` too.

This module must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from gyre.config.sections import MegatronSettings
from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.peers import exchange_bytes
from gyre.workloads.gang.world import World


class MegatronRanks(World):
    """Joins the groups for `context`'s rank; `close` leaves them. Raises RanksMissing, and ConfigError, also where the
    layout does not fit."""

    def __init__(
        self,
        context: WorkloadContext,
        settings: MegatronSettings,
        *,
        device: torch.device,
        timeout_s: float,
        seed: int,
    ) -> None:
        self.tensor, self.pipeline = settings.tensor_parallel, settings.pipeline_parallel
        self.replica_size = self.tensor * self.pipeline
        if context.world_size % self.replica_size:
            raise ConfigError(
                f"{context.role} has {context.world_size} ranks, not a multiple of tensor_parallel x pipeline_parallel "
                f"({self.tensor} x {self.pipeline}).",
                hint=f"Give the role a total that {self.replica_size} divides.",
            )
        super().__init__(context, device=device, timeout_s=timeout_s)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        )
        # Nothing is dropped out; this tracker is the one that draws nothing and forks nothing.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
        self.first_stage = parallel_state.is_pipeline_first_stage()
        self.last_stage = parallel_state.is_pipeline_last_stage()
        self.tensor_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self.replica: int = parallel_state.get_data_parallel_rank()
        self.replica_count: int = parallel_state.get_data_parallel_world_size()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.replica_group = parallel_state.get_model_parallel_group()

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank counts its replica's samples: one does."""
        return self.first_stage and self.tensor_rank == 0

    @property
    def speaks_for_losses(self) -> bool:
        """Whether this rank counts its replica's losses: one of those that have the logits does."""
        return self.last_stage and self.tensor_rank == 0

    def pool_shares(self, groups: Sequence[Group]) -> list[Group]:
        """What the ranks of this replica were given, together, by the groups' ids: the same on each of them."""
        if self.replica_size == 1:
            return list(groups)
        blobs = exchange_bytes(pack_groups(groups), self.replica_size, self.replica_group)
        pooled = [group for blob in blobs for group in unpack_groups(blob)]
        return sorted(pooled, key=lambda group: group.id)

    def any(self, flag: bool) -> bool:
        """Whether any rank of this replica says so: they compute together."""
        if self.replica_size == 1:
            return flag
        said = torch.tensor(float(flag))
        dist.all_reduce(said, group=self.replica_group)
        return bool(said > 0)

    def from_last_stage(self, values: torch.Tensor | None, count: int) -> torch.Tensor:
        """The float32 `[count]` that the last stage's ranks have, on every rank of the replica, in host memory."""
        told = torch.zeros(count) if values is None else values
        if self.pipeline > 1:
            last = dist.get_global_rank(self.pipeline_group, self.pipeline - 1)
            dist.broadcast(told, src=last, group=self.pipeline_group)
        return told

    def close(self) -> None:
        """Leave the groups. Safe to call twice."""
        if self._joined:
            parallel_state.destroy_model_parallel()
        super().close()


class Reader(Protocol):
    """Who reads what ranks wrote: one of `MegatronRanks`, or `OneReader`. `tensor` of them share a layer, and it has
    the place `tensor_rank` among those."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def tensor(self) -> int: ...

    @property
    def tensor_rank(self) -> int: ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all readers."""
        ...


@dataclass(frozen=True, slots=True)
class OneReader:
    """A process that reads by itself, and joins no group: it has whole parameters."""

    rank: int = 0
    world_size: int = 1
    tensor: int = 1
    tensor_rank: int = 0

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)
