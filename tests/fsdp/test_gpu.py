"""What kernels of a GPU say is what a dozen operations of torch say, in float32 to the last digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.workloads.fsdp.fused import _rotated, rms_norm
from gyre.workloads.learner.devices import make_deterministic

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def drawn(*shape: int, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    made = torch.randn(*shape, device="cuda", dtype=dtype)
    if transposed:
        made = made.transpose(1, 2).contiguous().transpose(1, 2)
    return made.requires_grad_()


def agree(mine: Any, theirs: Any, *given: Tensor) -> None:
    """The results, and the gradients of what was given, each as part of its size; twice the same bits."""
    said, wanted = mine(*given), theirs(*(one.double() for one in given))
    gradient = torch.randn_like(said)
    found = torch.autograd.grad(said, given, gradient, retain_graph=True)
    again = torch.autograd.grad(mine(*given), given, gradient)
    expected = torch.autograd.grad(wanted, given, gradient.double())
    for one, twice, other in zip((said, *found), (mine(*given), *again), (wanted, *expected), strict=True):
        assert torch.equal(one, twice)
        assert float((one - other).double().norm() / other.double().norm()) < CLOSE[said.dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(1, 700, 9728), (3, 5, 10), (1, 1, 1025)])
def test_a_gated_unit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from gyre.workloads.learner.gpu_kernels import GatedUnit

    make_deterministic()
    given = [drawn(*shape, dtype=dtype) for _ in range(2)]
    agree(GatedUnit.apply, lambda gate, up: F.silu(gate) * up, *given)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 700, 128), (1, 3, 5, 20), (1, 1, 1, 2)])
def test_rotary_positions(dtype: torch.dtype, transposed: bool, shape: tuple[int, ...]) -> None:
    from gyre.workloads.learner.gpu_kernels import Rotated

    make_deterministic()
    x = drawn(*shape, dtype=dtype, transposed=transposed)
    cos, sin = (torch.randn(1, *shape[2:], device="cuda", dtype=dtype) for _ in range(2))
    said = Rotated.apply(x, cos, sin)
    assert said.stride() == x.stride()
    agree(lambda x: Rotated.apply(x, cos, sin), lambda x: _rotated(x, cos.to(x), sin.to(x)), x)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(1, 700, 2560), (1, 5, 32, 128)])
def test_a_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    make_deterministic()
    given = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)

    def by_hand(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    agree(lambda x, weight: rms_norm(x, weight, 1e-6), by_hand, *given)
