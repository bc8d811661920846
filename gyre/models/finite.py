"""Whether weights are numbers: a file may be whole, and hold NaN or infinity.

Nothing can be learnt from such weights, and where it shows is far from where it comes from: in a sample's log-probs, or
in a gradient's norm. So whoever takes weights looks at what it takes.

This module must not know where tensors come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gyre.models.errors import ModelFolderError


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. Reads all of them once, and takes no memory."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())  # either is NaN where an element is
    return bool(torch.isfinite(low) and torch.isfinite(high))


def refuse_not_finite(names: Sequence[str]) -> None:
    """Raises ModelFolderError where there are names, which are those of tensors that are not finite."""
    if names:
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        raise ModelFolderError(
            f"the weights are broken: NaN or infinity is in {names[0]}{more}.",
            hint="Copy or download the folder again, or take an earlier checkpoint of whoever trained it.",
        )
