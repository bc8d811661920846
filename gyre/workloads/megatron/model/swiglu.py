"""SwiGLU (Shazeer, arXiv 2002.05202) and its gradient, each as one kernel for GPUs.

Megatron has torch compile them. To import the compiler and to compile, once for one width of a pass and again for any,
takes a process seconds of its first steps, and it happens anew whenever a rank starts again.

This module must not be imported where there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from megatron.core.fusions import fused_bias_swiglu
from torch import Tensor

COLUMNS = 1024
"""Of a row that one program computes: four for each thread."""


def use_in_megatron() -> None:
    """Have Megatron's activation, which keeps its input alone for the gradient, compute with these kernels. Harmless
    when repeated."""
    fused_bias_swiglu.swiglu = swiglu
    fused_bias_swiglu.swiglu_back = swiglu_back


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up`, `[…, width]`, of `both` `[…, 2 * width]`: the gate, then what it lets through."""
    both = both.contiguous()
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    if out.numel():
        _forward[_grid(out)](both, out, width, columns=COLUMNS)
    return out


def swiglu_back(gradient: Tensor, both: Tensor) -> Tensor:
    """The gradient `[…, 2 * width]` of `both`, of that of the result `[…, width]`."""
    gradient, both = gradient.contiguous(), both.contiguous()
    out = torch.empty_like(both)
    if out.numel():
        _backward[_grid(gradient)](gradient, both, out, gradient.shape[-1], columns=COLUMNS)
    return out


def _grid(out: Tensor) -> tuple[int, int]:
    width = out.shape[-1]
    return out.numel() // width, triton.cdiv(width, COLUMNS)


# Triton reads the annotations itself, and knows its own alone.


@triton.jit  # type: ignore[untyped-decorator]
def _forward(both, out, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = column < width
    gate = tl.load(both + row * 2 * width + column, mask=there).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=there).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(gradient, both, out, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = column < width
    of_out = tl.load(gradient + row * width + column, mask=there).to(tl.float32)
    gate = tl.load(both + row * 2 * width + column, mask=there).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=there).to(tl.float32)
    opened = tl.sigmoid(gate)
    of_gate = of_out * up * opened * (1.0 + gate * (1.0 - opened))
    tl.store(out + row * 2 * width + column, of_gate, mask=there)
    tl.store(out + row * 2 * width + width + column, of_out * gate * opened, mask=there)
