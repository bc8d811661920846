"""Weights rounded to what the codec `fp8` carries at half the bytes: e4m3 times a power of two for each 128 values.

Only matrices of the blocks are rounded, as serving engines do it that quantize to fp8 by blocks: `is_rounded` says
which. What is rounded stays bfloat16, for engines to load like any other weights.

Invariants:
- *stable*: rounding what was rounded changes nothing;
- *the same everywhere*: it rests on the values alone, not on the device that rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.weights.codecs.encoding import FP8_BLOCK

if TYPE_CHECKING:
    import torch

AT_A_TIME = {"cpu": 1 << 19}
"""Values in a part, by kind of device: of few megabytes, which a cache holds. A multiple of the block."""
AT_A_TIME_ELSEWHERE = 1 << 24
"""So that no tensor is held twice in float32."""

LARGEST = 448.0
"""Of e4m3: 1.75 * 2^8. Its smallest normal value is 2^-6, and below it there are multiples of 2^-9."""

WHOLE = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "mlp.gate.weight", "router.weight")
"""Matrices that stay as they are, by how their names end: tokens are looked up in them or scored by them; routers."""

_MOST_SCALE = 100


def is_rounded(name: str, shape: tuple[int, ...]) -> bool:
    """Whether `fp8` rounds the tensor of this name and shape: matrices and stacks of them, but for `WHOLE`."""
    return len(shape) >= 2 and not name.endswith(WHOLE)


def round_fp8(values: torch.Tensor) -> torch.Tensor:
    """Float32 of the same shape, on the same device: each block of 128 consecutive values rounded to the nearest
    (half to even) e4m3 times the power of two that brings its largest just below 448. That leaves 4 significant bits:
    a relative error of at most 1/16, or of 2^-17 of the block's largest where that is more. The last block may
    be shorter. A block with a value that is not finite stays as it is. What comes out fits into bfloat16 exactly."""
    import torch

    flat = values.detach().reshape(-1)
    rounded = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    step = AT_A_TIME.get(flat.device.type, AT_A_TIME_ELSEWHERE)
    for at in range(0, len(flat), step):
        part = rounded[at : at + step].copy_(flat[at : at + step])
        whole = len(part) // FP8_BLOCK * FP8_BLOCK
        _round_blocks(part[:whole].view(-1, FP8_BLOCK))
        if whole < len(part):
            last = torch.nn.functional.pad(part[whole:], (0, whole + FP8_BLOCK - len(part)))
            part[whole:] = _round_blocks(last.view(1, -1)).view(-1)[: len(part) - whole]
    return rounded.view(values.shape)


def _round_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """In place. What rounds to 4 significant bits by its bits is the most; the few below the smallest normal code, and
    blocks that are not finite, are mended afterwards."""
    import torch

    bits = blocks.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    largest = magnitude.amax(dim=1).view(torch.float32)
    scale = torch.frexp(largest)[1] - 9  # largest < 512 * 2^scale
    scale = scale + (torch.ldexp(largest, -scale) > LARGEST)
    scale = torch.where(largest > 0, scale.clamp(-_MOST_SCALE, _MOST_SCALE), 0)
    one = torch.ones_like(largest)
    low = torch.ldexp(one, scale - 6).view(torch.int32)
    small = ((magnitude < low[:, None]) & (magnitude > 0)).nonzero(as_tuple=True)
    wild = (~torch.isfinite(largest)).nonzero(as_tuple=True)[0]
    mended, kept = blocks[small], blocks[wild]
    grid = torch.ldexp(one, scale - 9)[small[0]]
    bits += (magnitude.bitwise_right_shift_(20).bitwise_and_(1)).add_(0x7FFFF)  # half to even
    bits &= ~0xFFFFF
    blocks[small] = torch.round(mended / grid) * grid
    blocks[wild] = kept
    return blocks
