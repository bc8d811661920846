"""Megatron's activation by kernels that need no compiler: torch would compile its own anew in each process.

This module must not be imported where there is no GPU.
"""

from __future__ import annotations

import torch
from megatron.core.fusions import fused_bias_swiglu
from torch import Tensor

from gyre.workloads.learner import gpu_kernels


def use_in_megatron() -> None:
    """Have Megatron's activation, which keeps its input alone for the gradient, compute with these kernels. Harmless
    when repeated."""
    fused_bias_swiglu.swiglu = swiglu
    fused_bias_swiglu.swiglu_back = swiglu_back


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up`, `[…, width]`, of `both` `[…, 2 * width]`: the gate, then what it lets through."""
    gate, up = _rows(both).chunk(2, dim=1)
    return gpu_kernels.swiglu(gate, up).view(*both.shape[:-1], gate.shape[1])


def swiglu_back(gradient: Tensor, both: Tensor) -> Tensor:
    """The gradient `[…, 2 * width]` of `both`, of that of the result `[…, width]`."""
    gate, up = _rows(both).chunk(2, dim=1)
    out = torch.empty(gate.shape[0], 2 * gate.shape[1], dtype=both.dtype, device=both.device)
    gpu_kernels.swiglu_back(_rows(gradient), gate, up, *out.chunk(2, dim=1))
    return out.view(both.shape)


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])
