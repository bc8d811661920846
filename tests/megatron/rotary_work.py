"""What `test_rotary` has a rank compute. Megatron is imported there alone."""

from __future__ import annotations

from typing import Any


def rotations(rank: int, ranks: int, port: int, dtype: str) -> dict[str, Any]:
    """Values and gradients of both, each as float32; and the kernels that each takes, forwards and backwards."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from gyre.workloads.megatron.model.seam import open_seam

    open_seam(torch.device("cpu"))
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from gyre.workloads.megatron.model.rotary import Rotary, rotate

    torch.manual_seed(3)
    rotary = Rotary([1.0, 0.3, 0.1, 0.01], torch.device("cpu"))
    rotary.positions = torch.tensor([0, 1, 2, 0, 1, 500])
    angles = rotary(6)
    packed = torch.randn(
        6, 1, 5, 24, dtype=getattr(torch, dtype)
    )  # as queries lie in what the projection gives
    weights = torch.randn(6, 1, 5, 8, dtype=getattr(torch, dtype))

    def compute(function: Any) -> dict[str, Any]:
        states = packed.clone().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            rotated = function(states[..., 8:16], angles)
            rotated.backward(weights)
        assert states.grad is not None
        names = ("mul", "addcmul_", "add", "cat", "neg", "cos", "sin", "copy_", "zero_", "fill_")
        kernels = sum(one.count for one in found.key_averages() if one.key.removeprefix("aten::") in names)
        return {
            "rotated": rotated.detach().float().numpy(),
            "gradient": states.grad.float().numpy(),
            "kernels": kernels,
        }

    compute(rotate)  # makes the cosines, which all layers share
    return {"mine": compute(rotate), "megatrons": compute(_apply_rotary_pos_emb_bshd)}
