"""Tensors of zeros whose memory is not touched until it is written: slots that are never used cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


def zero_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like torch.zeros, which would touch every page."""
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(*shape)
