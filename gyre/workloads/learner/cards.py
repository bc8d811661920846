"""What a GPU can compute at most: the denominator of MFU.

This module must not import torch.
"""

from __future__ import annotations

import re

_TERA = 10**12

_DENSE_BF16 = (
    (r"\bB200\b", 2250.0),
    (r"\b(H200 NVL|H100 NVL)\b", 835.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\b(H200|H100|H800|GH200)\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\b(A100|A800)\b", 311.8),
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bL40S\b", 362.05),
    (r"\bL40\b", 181.05),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090\b(?! D)", 165.2),
)
"""By a part of the card's name, as its driver gives it: tera-operations a second of bfloat16 with sums of 32 bits, by
NVIDIA's data sheets, half of what these say where they say it "with sparsity". The first that fits. A card of several
variants, whose name does not tell them apart, has that of the SXM module."""


def peak_flops(card: str, dtype: str) -> float | None:
    """Operations a second of a card of this name; None where the card is not known, or the dtype is not bfloat16."""
    if dtype != "bfloat16":
        return None
    return next((peak * _TERA for part, peak in _DENSE_BF16 if re.search(part, card)), None)
