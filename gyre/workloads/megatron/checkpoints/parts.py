"""What one rank's state is made of: each tensor that a later step depends on, and what it is of the whole model.

A part is named by what every layout has in common: the parameter by the first of its tensors in Hugging Face's names,
and whether it is the weight itself, the optimizer's float32 weight, or one of its moments. `start` and `end` say which
elements of this rank's shard of the parameter it has, since the distributed optimizer cuts shards into flat ranges.

Invariants:
- *each byte once*: in float32 the optimizer works on the model's own weights, which are one part;
- *written once*: what every replica has is written by one of them, each its share, and a tied tensor's copy by nobody.

This module must not know where states are kept, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from gyre.workloads.megatron.model.hugging_face import HeldParameter, held_parameters
from gyre.workloads.megatron.model.parallel import MegatronRanks
from gyre.workloads.megatron.policy import MegatronPolicy

WEIGHT = "weight"
MAIN = "main"
RANDOM = "random"


@dataclass(frozen=True, slots=True)
class MegatronPart:
    """`tensor` is elements `start` to `end` of a flattened tensor in the `shape` of this rank's shard of the parameter
    `key`. `what` is `weight`, `main` or the name of an optimizer's state. Of `random` states, `what` is the device."""

    key: str
    what: str
    tensor: Tensor
    shape: tuple[int, ...]
    start: int
    end: int
    shared: bool = False
    """Whether every replica has it."""
    held: HeldParameter | None = None
    """None for random states."""

    @property
    def is_copy(self) -> bool:
        return self.held is not None and self.held.is_copy

    @property
    def name(self) -> str:
        copy = " copy" if self.is_copy else ""
        return f"{self.key}{copy}/{self.what}[{self.start}:{self.end}]"


def parts_of(policy: MegatronPolicy) -> list[MegatronPart]:
    """Everything that a later step depends on, in an order that the layout alone decides, what is shared first."""
    AdamState(policy).complete()
    held = held_parameters(policy.module, policy.architecture, policy.ranks, values=policy.values)
    model = dict(policy.module.named_parameters())
    weights = [_whole(held[name], WEIGHT, parameter, shared=True) for name, parameter in model.items()]
    known = {parameter.untyped_storage().data_ptr() for parameter in model.values()}
    names = {id(parameter): name for name, parameter in model.items()}
    states: list[MegatronPart] = []
    for one in policy.optimizer.chained_optimizers:
        for parameter, main, span in _main_parameters(one, model.values()):
            mine = held[names[id(parameter)]]
            shape = tuple(parameter.shape)
            start, end = span or (0, parameter.numel())
            tensors = sorted(one.optimizer.state[main].items())
            if main.untyped_storage().data_ptr() not in known:
                tensors.insert(0, (MAIN, main))
            for what, value in tensors:
                if not isinstance(value, Tensor):
                    continue
                if value.dim():
                    states.append(MegatronPart(mine.key, what, value, shape, start, end, span is None, mine))
                else:
                    states.append(MegatronPart(mine.key, what, value, (), 0, 1, span is None, mine))
    return [
        *weights,
        *(part for part in states if part.shared),
        *(part for part in states if not part.shared),
        *random_parts(policy.device),
    ]


def random_parts(device: torch.device) -> list[MegatronPart]:
    """The states that random numbers are drawn from. They are copies: see `take_random`."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state()
    return [
        MegatronPart(RANDOM, what, state, tuple(state.shape), 0, len(state)) for what, state in found.items()
    ]


def take_random(parts: Iterable[MegatronPart]) -> None:
    """Draw from these random states from now on."""
    for part in parts:
        if part.key == RANDOM and part.what == "cpu":
            torch.set_rng_state(part.tensor)
        elif part.key == RANDOM and part.what == "cuda":
            torch.cuda.set_rng_state(part.tensor)


def written_by(parts: Sequence[MegatronPart], ranks: MegatronRanks) -> list[MegatronPart]:
    """The parts that this rank writes: its own, and its replica's share of what all have, in equal numbers of bytes."""
    shared = [part for part in parts if part.shared and not part.is_copy]
    total = sum(part.tensor.nbytes for part in shared) or 1
    mine, before = [], 0
    for part in shared:
        if before * ranks.replica_count // total == ranks.replica:
            mine.append(part)
        before += part.tensor.nbytes
    return mine + [part for part in parts if not part.shared and not part.is_copy]


class MegatronState:
    """A `gyre.workloads.learner.memory_checkpoints.RankState`. The state is copied as it stands, without Megatron's way
    of describing it: it goes back into the same tensors. `on_taken` hears that it did."""

    def __init__(self, policy: MegatronPolicy, on_taken: Callable[[], None]) -> None:
        self._policy = policy
        self._on_taken = on_taken

    @property
    def layout(self) -> str:
        ranks, distributed = self._policy.ranks, self._policy.settings.distributed_optimizer
        return f"{ranks.tensor}x{ranks.pipeline}, {self._policy.dtype}, distributed {distributed}"

    def parts(self) -> list[MegatronPart]:
        return parts_of(self._policy)

    def written(self, parts: Sequence[MegatronPart]) -> list[MegatronPart]:
        return written_by(parts, self._policy.ranks)

    def taken(self, parts: Sequence[MegatronPart]) -> None:
        take_random(parts)
        self._on_taken()


def _whole(held: HeldParameter, what: str, tensor: Tensor, *, shared: bool) -> MegatronPart:
    return MegatronPart(held.key, what, tensor, tuple(tensor.shape), 0, tensor.numel(), shared, held)


def _main_parameters(
    one: Any, model: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor, tuple[int, int] | None]]:
    """Of one of Megatron's optimizers: the model's parameter, what AdamW steps, and the elements of the parameter that
    this rank steps; None where every replica steps all of it."""
    if isinstance(one, DistributedOptimizer):
        for parameter, (group, index) in one.model_param_group_index_map.items():
            span = one._get_model_param_range_map(parameter)["param"]
            yield parameter, one.optimizer.param_groups[group]["params"][index], (span.start, span.end)
        return
    stepped = {id(main) for group in one.optimizer.param_groups for main in group["params"]}
    for parameter in model:
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        if id(main) in stepped:
            yield parameter, main, None


class AdamState:
    """torch's AdamW inside Megatron's optimizer.

    Megatron describes an optimizer by the state that it has, and a new one has none; it reads the step from the state
    of every parameter and gives all of them one and the same tensor back, which AdamW then counts up once for each.
    """

    def __init__(self, policy: MegatronPolicy) -> None:
        every = [one.optimizer for one in policy.optimizer.chained_optimizers]
        self._optimizers = [one for one in every if isinstance(one, torch.optim.AdamW)]
        self.is_all = len(self._optimizers) == len(every)
        """Whether there is no other optimizer, such as Transformer Engine's."""

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


def begin_optimizer_anew(policy: MegatronPolicy) -> None:
    """It knows of no step, as before the first."""
    for one in policy.optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
