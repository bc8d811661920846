"""Checkpoints in host memory: each rank's own part after a step, for a gang of the same layout that comes back.

What a rank has — its shards of weights, of float32 weights and of the optimizer's moments, the random state — is copied
as it stands, without Megatron's way of describing it: it goes back into the same tensors of the same layout, bit by
bit. Any other layout is the disk's (`on_disk`).

Invariants:
- *all or none*: ranks keep states only if each of them has the room, and take one back only if each has that one whole;
- *one step, one life*: states belong together when they are of one step and of one gang's life (`lineage`). Two gangs
  that made the same step need not have the same bits;
- *seldom enough*: copies take at most `share` of the time, as the first rank measures it.

Every method but `close` and `unlink` is a collective of all ranks. This module must not know what a step is made of,
or where else a state may come from, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import torch
from torch import Tensor

from gyre.workloads.gang.host_memory import HostMemory, NoHostMemory, SlotRecord, plan
from gyre.workloads.megatron.checkpoints.on_disk import AdamState
from gyre.workloads.megatron.model.devices import page_locked
from gyre.workloads.megatron.model.parallel import Ranks
from gyre.workloads.megatron.policy import MegatronPolicy

_CPU_RANDOM = "random/cpu"
_CUDA_RANDOM = "random/cuda"


class MemoryCheckpoints:
    """`purpose` names the job and the role: see `HostMemory`. `share` of the time may be spent on copies; 1 keeps every
    step's state."""

    def __init__(self, policy: MegatronPolicy, purpose: str, *, share: float) -> None:
        self._policy = policy
        self._ranks: Ranks = policy.ranks
        self._share = share
        layout = f"{self._ranks.tensor}x{self._ranks.pipeline} of {self._ranks.world_size}"
        self._layout = f"{layout}, {policy.dtype}, distributed {policy.settings.distributed_optimizer}: "
        self._lineage = self._layout + self._ranks.from_first(uuid.uuid4().hex)
        self._has_room = False
        self._next_at = 0.0
        self._memory: HostMemory | None = None
        self.trouble = ""
        """Why there are none, where there are none."""
        problem = ""
        try:
            pin = page_locked if policy.device.type == "cuda" else None
            self._memory = HostMemory(purpose, self._ranks.rank, pin=pin)
        except (NoHostMemory, OSError) as error:
            problem = str(error)
        self._together(problem, keep=True)  # a later gang may find what this one cannot take

    @property
    def is_on(self) -> bool:
        return self._memory is not None

    def status(self) -> dict[str, Any]:
        """Facts for people: how long the last copy held training up, and what keeps states from being kept."""
        if self._memory is None:
            return {"trouble": self.trouble}
        return {"hold_s": round(self._memory.hold_s, 4)}

    def save_if_due(self, step: int, metadata: dict[str, Any]) -> bool:
        """After step `step`, whose `metadata` comes back with it: JSON, the same on every rank. Whether it was due."""
        if self._memory is None:
            return False
        due = self._ranks.rank == 0 and time.monotonic() >= self._next_at
        if not self._ranks.sum([float(due)])[0]:
            return False
        tensors = self._tensors()
        if not self._has_room:
            problem = ""
            try:
                self._memory.make_room(tensors)
            except (NoHostMemory, OSError) as error:
                problem = str(error)
            if not self._together(problem, keep=False):
                return False
            self._has_room = True
        # What fails from here on fails on this rank alone: the others keep a state that no gang will agree on.
        try:
            self._memory.save(tensors, lineage=self._lineage, step=step, book=metadata)
        except (NoHostMemory, OSError) as error:
            print(f"step {step} is not in host memory: {error}", flush=True)
        rest_s = self._memory.hold_s * (1.0 / self._share - 1.0)
        self._next_at = time.monotonic() + rest_s
        return True

    def restore(self, *, newer_than: int, at_most: int) -> dict[str, Any] | None:
        """Take the newest state back that every rank has, of a step beyond `newer_than` and up to `at_most`: its
        metadata, or None where there is none, and nothing is changed then."""
        if self._memory is None:
            return None
        tensors = self._tensors()
        spans = tuple(plan(tensors)[0])
        mine = {
            (record.lineage, record.step): record
            for record in self._memory.records()
            if newer_than < record.step <= at_most
            and record.lineage.startswith(self._layout)
            and record.spans == spans
        }
        offered = [tuple(key) for key in json.loads(self._ranks.from_first(json.dumps(list(mine))))]
        counts = self._ranks.sum([0.0, *(float(key in mine) for key in offered)])[1:]
        for key, count in zip(offered, counts, strict=True):
            if count == self._ranks.world_size and self._all(self._memory.is_right(mine[key])):
                return self._load(mine[key], tensors)
        return None

    def _load(self, record: SlotRecord, tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
        assert self._memory is not None
        self._memory.load(record, tensors)
        for name, tensor in tensors:
            if name == _CPU_RANDOM:
                torch.set_rng_state(tensor)
            elif name == _CUDA_RANDOM:
                torch.cuda.set_rng_state(tensor)
        return record.book

    def drop(self) -> None:
        """The states are of a history that is not gone on with. No collective is made of it."""
        if self._memory is not None:
            self._memory.drop()

    def close(self, *, keep: bool) -> None:
        """Leave the states to a successor, or remove them."""
        if self._memory is not None:
            self._memory.close(keep=keep)
            self._memory = None

    def unlink(self) -> None:
        """Remove this rank's, on another thread than the one that may be at work here. No collective."""
        memory = self._memory
        if memory is not None:
            memory.unlink()

    # -- all ranks together --------------------------------------------------------------------------

    def _together(self, problem: str, *, keep: bool) -> bool:
        """Whether nobody has a problem. Where somebody has, nobody keeps states from now on."""
        if self._all(not problem):
            return True
        self.trouble = problem or "another rank has no room for its state"
        print(f"no checkpoints in host memory: {self.trouble}", flush=True)
        self.close(keep=keep)
        return False

    def _all(self, holds: bool) -> bool:
        return self._ranks.sum([float(not holds)])[0] == 0.0

    # -- what a rank has -----------------------------------------------------------------------------

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Everything that a later step depends on, each byte once, in an order that the layout alone decides."""
        AdamState(self._policy).complete()
        model = [(f"model/{name}", parameter) for name, parameter in self._policy.module.named_parameters()]
        known = {parameter.untyped_storage().data_ptr() for _, parameter in model}
        found: list[tuple[str, Tensor]] = list(model)
        for at, one in enumerate(self._policy.optimizer.chained_optimizers):
            optimizer = one.optimizer
            for group_at, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    name = f"optimizer/{at}/{group_at}/{index}"
                    # In float32 the optimizer works on the model's own weights, or on views of them.
                    if parameter.untyped_storage().data_ptr() not in known:
                        found.append((f"{name}/weight", parameter))
                    found += [
                        (f"{name}/{key}", value)
                        for key, value in sorted(optimizer.state[parameter].items())
                        if isinstance(value, Tensor)
                    ]
        found.append((_CPU_RANDOM, torch.get_rng_state()))
        if self._policy.device.type == "cuda":
            found.append((_CUDA_RANDOM, torch.cuda.get_rng_state()))
        return found


_CPU_RANDOM = "random/cpu"
_CUDA_RANDOM = "random/cuda"
