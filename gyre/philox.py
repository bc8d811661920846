"""Random numbers that are a function of where they are used, not of what was drawn before: Philox4x32-10.

Invariant *no stream*: a number depends on `(seed, stream, a, b, c)` alone, so a sample draws the same numbers
whoever its batch neighbours are, on whichever instance, after any restart.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11),
vectorised over numpy arrays. This module must not know what the numbers are for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LOW32 = 0xFFFFFFFF
_MULTIPLIER0, _MULTIPLIER1 = 0xD2511F53, 0xCD9E8D57
_LOW = np.uint64(_LOW32)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(_MULTIPLIER0), np.uint64(_MULTIPLIER1))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[NDArray[np.uint64], ...], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], ...]:
    """Four counter words to four random words, each a 32-bit number held in uint64, elementwise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0, c1, c2, c3


def words(seed: int, stream: int, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for each element of the broadcast of `a` (64-bit, may be negative), `b` and `c` (32-bit).

    `stream` tells apart the uses of one seed.
    """
    wide = _unsigned(a)
    counter = np.broadcast_arrays(wide & _LOW, wide >> _SHIFT, _unsigned(b) & _LOW, _unsigned(c) & _LOW)
    r0, r1, _, _ = philox4x32(tuple(counter), _key(seed, stream))
    return (r0 << _SHIFT) | r1


def word(seed: int, stream: int, a: int, b: int = 0, c: int = 0) -> int:
    """What `words` gives for these numbers alone, in a twentieth of its time."""
    c0, c1, c2, c3 = a & _LOW32, (a >> 32) & _LOW32, b & _LOW32, c & _LOW32
    k0, k1 = _key(seed, stream)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER0, c2 * _MULTIPLIER1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW32, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0 << 32 | c1


def uniforms(seed: int, stream: int, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float64]:
    """Like `words`, as float64 in `[0, 1)` with 53 random bits."""
    return (words(seed, stream, a, b, c) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int, stream: int) -> tuple[int, int]:
    return (seed ^ (stream * _WEYL[0])) & _LOW32, ((seed >> 32) ^ stream) & _LOW32


def _unsigned(value: ArrayLike) -> NDArray[np.uint64]:
    array: NDArray[Any] = np.asarray(value)
    return array if array.dtype == np.uint64 else array.astype(np.int64).astype(np.uint64)
