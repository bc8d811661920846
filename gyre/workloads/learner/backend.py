"""What a learner asks of the thing that computes its model: the protocol of a back end.

A learner (`gyre.workloads.learner.learner`) makes, repeats, refuses and accounts steps. A back end has the model, its
gradient, its optimizer and its files, and knows of none of that. Plain torch, Megatron-core and FSDP2 are three of
them; docs/bring-your-own.md has a fourth.

This module must not know how anything is computed, and must not import a back end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gyre.models.safetensors_folder import TensorSource
from gyre.rollouts.samples import Group
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.packing import Pass

TokenLoss = Callable[[Pass, Tensor, Tensor], LossSum]
"""The loss of a pass from what the model says of its `n` predicted tokens, both float32 `[n]`: of a policy the
log-probs at the sampling temperature and the entropies; of a value model the values, and zeros. `LossSum.loss` has a
gradient."""


class Ranks(Protocol):
    """The ranks of one role, as far as a learner needs them.

    Ranks that work on the same samples, each on its part of the model, are a *replica*. With FSDP2 and in plain torch a
    replica is one rank. Every method that talks to others is called by all of them, in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def replica(self) -> int: ...

    @property
    def replica_count(self) -> int: ...

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank counts its replica's samples: one of each replica does."""
        ...

    @property
    def speaks_for_losses(self) -> bool:
        """Whether this rank counts its replica's losses: one of those that have them does."""
        ...

    def pool_shares(self, groups: Sequence[Group]) -> list[Group]:
        """What the ranks of this replica were given, together: the same on each of them."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any of the ranks without which this one cannot compute a pass."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64; the same bits on each."""
        ...

    def broadcast(self, buffer: Tensor) -> None:
        """Replace a buffer in host memory by the first rank's."""
        ...

    def from_first(self, text: str) -> str:
        """The first rank's text, on every rank."""
        ...

    def exchange(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes, by rank."""
        ...

    def close(self) -> None:
        """Leave the groups. Safe to call twice."""
        ...


class StateMemory(Protocol):
    """States that outlive the process, in its machine's memory. A call of all ranks, but for `is_on`."""

    @property
    def is_on(self) -> bool:
        """Whether there is room for them, on every rank."""
        ...

    def save_if_due(self, step: int, metadata: dict[str, Any]) -> bool:
        """Keep the state after `step`, if copies have not taken too much of the time. Whether it was due."""
        ...

    def restore(
        self,
        *,
        newer_than: int,
        at_most: int,
        before: Callable[[], None] = lambda: None,
        beside: Callable[[], None] = lambda: None,
    ) -> dict[str, Any] | None:
        """Take back the newest state that every rank has, of a step beyond `newer_than` and up to `at_most`: its
        metadata, or None where there is none that is whole. `before` is called on every rank before anything is
        changed: if the answer is None after that, what the ranks have is no state. `beside` is called on every rank
        while the state comes back; it may compute with whatever the weights are then."""
        ...

    def close(self, *, keep: bool) -> None:
        """Leave the states to a successor, or remove them. No collective."""
        ...


def begin_anew(context: WorkloadContext, ranks: Ranks) -> bool:
    """Whether the ranks most likely begin with the first weights: those that are started again are most likely
    restored, and what they would read before that is of no use. The same on every rank, though one may be new beside
    others."""
    return not ranks.sum([float(context.incarnation > 1)])[0]


class LearnerBackend(Protocol):
    """A model with its optimizer on this rank. It is made by the job's settings alone: after that, equal calls give
    equal bits, and so do those after a restore.

    All ranks make the same calls in the same order, each with its own passes, of which there may be none.
    """

    @property
    def ranks(self) -> Ranks: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> str:
        """Of the weights that it computes with: `float32`, `bfloat16`."""
        ...

    @property
    def pass_tokens(self) -> int | None:
        """The most tokens in a pass, as configured; None where a micro-batch is one pass, whatever its size."""
        ...

    @property
    def may_recompute(self) -> bool:
        """Whether it keeps activations by its own choice, and can compute them again instead; see `recompute`."""
        ...

    @property
    def width_multiple(self) -> int:
        """The width of a pass must be a multiple of this."""
        ...

    @property
    def prompts_once(self) -> bool:
        """Whether passes may have what sequences share once: nodes with `parents`, see `packing.Pass`. Asked for each
        micro-batch."""
        ...

    @property
    def weight_bytes(self) -> int:
        """About how much `weights` gives; 0 where nobody knows."""
        ...

    @property
    def memory(self) -> StateMemory | None:
        """Where states are kept beyond this process, if the back end can."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether there are weights yet: those that training begins with, or others that were taken since. The same on
        every rank. Where it is not so, `take_first`, `load`, `restore` or `memory.restore` is what is called next."""
        ...

    def take_first(self) -> None:
        """Take the weights that training begins with. Raises as the back end's making does where it takes them at
        once."""
        ...

    def recompute(self, *, on: bool) -> None:
        """Whether passes' activations are computed again for their gradient, which takes less memory and has the same
        bits. It is called where it `may_recompute`, between steps, on every rank alike."""
        ...

    def zero(self) -> None:
        """Forget the gradient that was summed."""
        ...

    def backward(self, passes: Sequence[Pass], loss: TokenLoss) -> list[LossSum]:
        """Add the gradient of the passes' losses, in float32 and divided by nothing. Returns each loss, detached, on
        the ranks that have it; nothing on others. After an exception the sum is of no use, until `zero`."""
        ...

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        """What the model says of each pass's predicted tokens, float32 `[n]` in host memory: log-probs, or values. On
        every rank of the replica."""
        ...

    def update(self, *, count: float, lr: float) -> float:
        """Divide the gradient, summed over all ranks, by `count`, clip its norm, and step the optimizer. Returns the
        norm before the clip. Raises NotFinite on all ranks together, and then no weight has changed. The gradient is
        zero afterwards."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, whole, one after the other, by the name that engines know. On the first rank; on
        others nothing comes. A call of all ranks: exhaust it on each. A later step may change the tensors."""
        ...

    def load(self, source: TensorSource) -> None:
        """Take these weights, and begin the optimizer anew. Raises WeightMismatch or ModelFolderError where they are of
        another model; nothing has changed then."""
        ...

    def prepare(self) -> None:
        """Get ready for the first step's checkpoint, beside the step. Not a collective; safe to call again."""
        ...

    def save(self, path: Path, metadata: dict[str, Any], digest: Callable[[], str | None]) -> None:
        """Begin to write weights, optimizer and `metadata`, which is plain data, below the folder `path`. Later steps
        change nothing of what is written. What `digest` returns, which is called on any thread, is kept beside the
        metadata under its name. It gives up an earlier one that is not finished."""
        ...

    def saved(self, *, wait: bool) -> bool:
        """Whether what `save` began is on the disk, on every rank; with `wait` it returns when that is so. Raises
        CheckpointMismatch on all ranks together where it cannot be written."""
        ...

    def restore(self, path: Path) -> dict[str, Any]:
        """Load what any number of ranks saved below `path`, and return its metadata. Raises CheckpointMismatch where it
        is absent, incomplete or another model's; nothing has changed then."""
        ...

    def status(self) -> dict[str, Any]:
        """Facts for people."""
        ...

    def close(self, *, keep: bool) -> None:
        """Give everything back; with `keep` states in memory stay for a successor. Safe to call twice."""
        ...

    def unlink(self) -> None:
        """Remove what would outlive the process, beside a call that does not end. Not a collective."""
        ...
