"""Attention along paths for tests: what torch says of each path alone, and the kernel that GPUs have, played."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.workloads.learner.packing import laid_out, paths_of
from tests.workloads.learner.trees import drawn_tree

PASS = laid_out(drawn_tree(48), 8)
TOKENS = len(PASS.tokens)
CPU = torch.device("cpu")
WAYS = ["sequence by sequence", "by bounds", "by bounds, keys for each head"]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    bounds: Tensor,
    longest: int,
    longest_path: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch documents of `varlen_attn`, aligned to the lower right as FlashAttention is."""
    lengths, of_keys = queries.diff().tolist(), bounds.diff().tolist()
    assert (longest, longest_path) == (max(lengths), max(of_keys))
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert window_size[1] == 0
    out = []
    for a, b, c in zip(q.split(lengths), k.split(of_keys), v.split(of_keys), strict=True):
        row = torch.arange(len(a))[:, None] + len(b) - len(a)
        column = torch.arange(len(b))[None]
        seen = column <= row
        if window_size[0] >= 0:
            seen &= column >= row - window_size[0]
        a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
        mixed = F.scaled_dot_product_attention(a, b, c, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def attended(attend: Any) -> list[Tensor]:
    q, k, v = (drawn(TOKENS, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    found = attend(q, k, v)
    return [found, *torch.autograd.grad((found * drawn(*found.shape)).sum(), (q, k, v))]


def plainly(window: int | None) -> Any:
    """Each path alone, by torch."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for length, path in zip(PASS.lengths, paths_of(PASS.lengths, PASS.parents), strict=True):
            at = torch.from_numpy(path)
            a, b, c = (x[at].transpose(0, 1)[None] for x in (q, k, v))
            row, column = torch.arange(len(at))[:, None], torch.arange(len(at))[None]
            seen = (column <= row) & (column > row - (window or len(at)))
            mixed = F.scaled_dot_product_attention(a, b, c, attn_mask=seen, enable_gqa=True)
            found.append(mixed[0].transpose(0, 1)[-length:])
        return torch.cat(found)

    return attend
