"""Rotary position embedding (Su et al., arXiv 2104.09864): angles by token, and the rotation by them.

Unless Transformer Engine is there, Megatron takes some ten kernels for the rotation, and as many for its gradient. Here
each takes four, and the cosines are made once for all layers. It comes in where Megatron asks for Transformer Engine's:
a small model is trained as fast as its kernels are launched.

This module must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def use_in_megatron() -> None:
    """Have Megatron rotate with `rotate` where a configuration has `apply_rope_fusion`. Harmless when repeated."""
    rope_utils.fused_apply_rotary_pos_emb = rotate


class Rotary(nn.Module):
    """Rotary angles by token. `positions` (int64 `[tokens]`) are set before each forward; None counts from 0."""

    def __init__(self, frequencies: list[float], device: torch.device) -> None:
        super().__init__()
        self.frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
        self.positions: Tensor | None = None

    def get_rotary_seq_len(
        self, inference: Any, transformer: Any, hidden: Tensor | None, config: TransformerConfig, *_: Any
    ) -> int:
        """How many tokens each row has, as Megatron asks it of its own class."""
        first = transformer.input_tensor if transformer.input_tensor is not None else hidden
        assert first is not None
        sharded = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return int(first.shape[0]) * sharded

    def forward(self, tokens: int, **_: Any) -> Tensor:
        """Angles float32 `[tokens, 1, 1, head_dim]`; both halves of the last dimension are the same."""
        positions = self.positions
        if positions is None:
            positions = torch.arange(tokens, device=self.frequencies.device)
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def rotate(states: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Queries or keys `[tokens, rows, heads, head_dim]`, rotated by `Rotary`'s angles."""
    assert not interleaved, "the pairs are the halves of a head"
    known = getattr(angles, "gyre_turns", None)
    if known is None or known[0].dtype != states.dtype:
        half = angles[..., : angles.shape[-1] // 2]
        known = angles.gyre_turns = (  # type: ignore[attr-defined]
            half.cos().to(states.dtype),
            half.sin().to(states.dtype),
        )
    rotated: Tensor = _Rotation.apply(states, *known)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """A rotation's gradient is the gradient, rotated back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(states, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1.0), None, None


def _turned(states: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    first, second = states.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out
