"""Keys and values of a pass whose nodes have parents: what each node attends to is the tokens of its path.

Kernels for bounds, and those for one sequence, get queries by node, and keys gathered along the paths, so that causal
is aligned to the lower right: the last query of a node sees the last key of its path.

Invariant *the same bits*: what a token's key gets of the gradient is the sum over all nodes that saw it, in their order
and in one kernel that adds up in float32; nothing is added atomically.

This module must not know about models, or by which kernel they attend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.workloads.learner.packing import on_device, paths_of


@dataclass(frozen=True, slots=True)
class PathKeys:
    """The keys of all nodes' paths side by side: `lengths` of the paths on the host, and on the device their bounds
    int32 `[nodes + 1]`.

    `tokens` int64 `[keys]`: which token each key is of. The other way round `keys` int64 `[keys]` are the keys of the
    first token, then those of the second; each token's begin at `begins` int64 `[tokens]`.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    tokens: Tensor
    keys: Tensor
    begins: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> PathKeys | None:
        """None where no node has a parent: each attends to itself."""
        if not parents:
            return None
        paths = paths_of(lengths, parents)
        sizes = [len(path) for path in paths]
        tokens = np.concatenate(paths)
        counts = np.bincount(tokens, minlength=sum(lengths))

        def there(array: Any) -> Tensor:
            return on_device(torch.from_numpy(array), device)

        return cls(
            lengths=tuple(sizes),
            bounds=there(np.cumsum([0, *sizes], dtype=np.int32)),
            tokens=there(tokens),
            keys=there(np.argsort(tokens, kind="stable")),
            begins=there(np.cumsum(counts) - counts),
        )

    def gather(self, states: Tensor) -> Tensor:
        """`[keys, …]` of keys or values `[tokens, …]`."""
        gathered: Tensor = _Gathered.apply(states, self.tokens, self.keys, self.begins)  # type: ignore[no-untyped-call]
        return gathered

    def attend(
        self,
        attention: Callable[[Tensor, Tensor], Tensor],
        key: Tensor,
        value: Tensor,
        *,
        repeats: int = 1,
        kept: bool = False,
    ) -> Tensor:
        """What `attention` gives for the keys and values of the paths, each head of them `repeats` times. Unless they
        are `kept` they are gathered again for the gradient: else they would take several times the tokens' memory in
        each layer."""

        def along(states: Tensor) -> Tensor:
            gathered = self.gather(states)
            return gathered.repeat_interleave(repeats, dim=1) if repeats > 1 else gathered

        keys, values = along(key), along(value)
        if kept or not torch.is_grad_enabled():
            return attention(keys, values)
        sources = {
            (gathered.data_ptr(), gathered.shape): source.detach()
            for gathered, source in ((keys, key), (values, value))
        }

        def pack(saved: Tensor) -> Tensor | _Again:
            source = sources.get((saved.data_ptr(), saved.shape))
            return saved.detach() if source is None else _Again(source)  # an output would hold what holds it

        def unpack(saved: Tensor | _Again) -> Tensor:
            return along(saved.source) if isinstance(saved, _Again) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return attention(keys, values)


@dataclass(frozen=True, slots=True)
class _Again:
    """What is to be gathered again."""

    source: Tensor


class _Gathered(torch.autograd.Function):
    """`index_select`, whose own gradient is added up in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tensor, keys: Tensor, begins: Tensor) -> Tensor:
        ctx.save_for_backward(keys, begins)
        return states.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        keys, begins = ctx.saved_tensors
        rows = gradient.reshape(len(gradient), -1)
        summed = F.embedding_bag(keys, rows, begins, mode="sum")
        return summed.reshape(len(begins), *gradient.shape[1:]), None, None, None
