"""Stands in for SGLang's native kernels: every name can be imported, and says so when it is called.

One operator is real, for SGLang's seeds draw by it: a hash, in plain torch, of the same values as SGLang's own
(`sglang/kernels/ops/sampling/murmur_hash.py`: MurmurHash3 of the seed's two halves, the position and the column).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

_32_BITS = 0xFFFFFFFF


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """`seed` and `positions` `[n]`, `col_indices` `[m]`; int64 `[n, m]` with values below 2**32."""
    rows = seed.to(torch.int64)[:, None]
    blocks = (
        rows & _32_BITS,
        rows >> 32,
        positions.to(torch.int64)[:, None],
        col_indices.to(torch.int64)[None],
    )
    hashed = torch.zeros(1, dtype=torch.int64)
    for block in blocks:
        hashed = _mixed(hashed, block)
    hashed = hashed ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _32_BITS
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _32_BITS
    return hashed ^ (hashed >> 16)


def _mixed(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # Products beyond 64 bits wrap, and the low 32 bits are right.
    block = (_rotated((block * 0xCC9E2D51) & _32_BITS, 15) * 0x1B873593) & _32_BITS
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _32_BITS


def _rotated(value: torch.Tensor, by: int) -> torch.Tensor:
    return ((value << by) | (value >> (32 - by))) & _32_BITS


_SCHEMA = "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
_operators = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(_SCHEMA)  # type: ignore[no-untyped-call]
_operators.impl(  # type: ignore[no-untyped-call]
    "murmur_hash32_cpu", murmur_hash32_cpu, "CompositeExplicitAutograd"
)


def _absent(name: str) -> Callable[..., NoReturn]:
    def absent(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not here: this is Gyre's stand-in for tests on a CPU."
        )

    absent.__name__ = name
    return absent


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(name)
