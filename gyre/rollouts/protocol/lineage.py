"""The name of a sample as far as it got."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def lineage(prompt: NDArray[np.int32], seed: int, tokens: NDArray[np.int32]) -> str:
    """Names a sample as far as it got: who has the same goes on from the same tokens. xxh3-64 in hexadecimal."""
    digest = xxhash.xxh3_64(seed.to_bytes(8, "little"))
    for ids in (prompt, tokens):
        digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()
