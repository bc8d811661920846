"""What a layer computes beside its products, each as one kernel for GPUs: what would be a dozen passes over memory.

SwiGLU (Shazeer, arXiv 2002.05202) and rotary positions (Su et al., arXiv 2104.09864), with their gradients. All compute
in float32 and round once. Nothing is added up by several programs, so equal inputs give equal bits.

To have torch compile the same takes each new process seconds of its first steps. Triton keeps what it compiled on the
disk.

This module must not be imported where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Of a row that one program computes: four for each thread."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[rows, width]`, contiguous. Rows of `gate` and `up` have the same distance, and their last
    dimension the stride 1."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _swiglu[_grid(out)](gate, up, out, gate.shape[1], gate.stride(0), columns=COLUMNS)
    return out


def swiglu_back(gradient: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor) -> None:
    """Write the gradients of `gate` and `up` of that of the result, which is contiguous. The rows of each pair have the
    same distance, as in `swiglu`."""
    if gradient.numel():
        _swiglu_back[_grid(gradient)](
            gradient,
            *(gate, up, of_gate, of_up),
            *(gate.shape[1], gate.stride(0), of_gate.stride(0)),
            columns=COLUMNS,
        )


def _grid(out: Tensor) -> tuple[int, int]:
    rows, width = out.shape
    return rows, triton.cdiv(width, COLUMNS)


class GatedUnit(torch.autograd.Function):
    """`silu(gate) * up` of tensors of one shape, which are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        rows = [one.contiguous().view(-1, one.shape[-1]) for one in (gate, up)]
        ctx.save_for_backward(*rows)
        return swiglu(*rows).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        swiglu_back(gradient.contiguous().view(gate.shape), gate, up, of_gate, of_up)
        return of_gate.view(gradient.shape), of_up.view(gradient.shape)


class Rotated(torch.autograd.Function):
    """`x * cos + half(x) * sin`, where `half` has the second half of each head first, negated: of `x`
    `[1, heads, tokens, d]` in any strides whose last is 1; `cos` and `sin` `[1, tokens, d]`, contiguous, have no
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, back=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    _, heads, tokens, d = x.shape
    out = torch.empty_like(x)  # keeps the strides, so that what comes next need not copy
    if x.numel():
        _rotate[(tokens,)](
            x,
            cos,
            sin,
            out,
            *(x.stride(1), x.stride(2), out.stride(1), out.stride(2)),
            heads,
            d // 2,
            back=back,
            heads_of_two=triton.next_power_of_2(heads),
            half_of_two=triton.next_power_of_2(d // 2),
        )
    return out


# Triton reads the annotations itself, and knows its own alone.


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(gate, up, out, width, between, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = column < width
    opens = tl.load(gate + row * between + column, mask=there).to(tl.float32)
    passes = tl.load(up + row * between + column, mask=there).to(tl.float32)
    tl.store(out + row * width + column, opens * tl.sigmoid(opens) * passes, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_back(  # type: ignore[no-untyped-def]
    gradient, gate, up, of_gate, of_up, width, between, between_out, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = column < width
    of_out = tl.load(gradient + row * width + column, mask=there).to(tl.float32)
    opens = tl.load(gate + row * between + column, mask=there).to(tl.float32)
    passes = tl.load(up + row * between + column, mask=there).to(tl.float32)
    opened = tl.sigmoid(opens)
    slope = opened * (1.0 + opens * (1.0 - opened))
    tl.store(of_gate + row * between_out + column, of_out * passes * slope, mask=there)
    tl.store(of_up + row * between_out + column, of_out * opens * opened, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    x_head,
    x_token,
    out_head,
    out_token,
    heads,
    half,
    back: tl.constexpr,
    heads_of_two: tl.constexpr,
    half_of_two: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, heads_of_two)[:, None]
    column = tl.arange(0, half_of_two)[None, :]
    there = (head < heads) & (column < half)
    angle = token * 2 * half + column
    cos_low = tl.load(cos + angle, mask=column < half).to(tl.float32)
    cos_high = tl.load(cos + angle + half, mask=column < half).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=column < half).to(tl.float32)
    sin_high = tl.load(sin + angle + half, mask=column < half).to(tl.float32)
    at = x + token * x_token + head.to(tl.int64) * x_head + column
    low = tl.load(at, mask=there).to(tl.float32)
    high = tl.load(at + half, mask=there).to(tl.float32)
    if back:
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
    to = out + token * out_token + head.to(tl.int64) * out_head + column
    tl.store(to, new_low, mask=there)
    tl.store(to + half, new_high, mask=there)
