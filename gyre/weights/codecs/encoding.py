"""How the bytes of a chunk go over the wire: as they are, or as fewer.

    none     the bytes
    planes   byte planes (the first bytes of all words, the second ones, ...), each through zstd
    delta    against the same chunk of another version: gaps between the words that differ, and their new values, as
             byte planes through zstd. Values are absolute, so that a delta applied twice gives the same, and deltas
             that follow on each other are one (`chain`)
    fp8      e4m3 codes with a power of two for each 128 words; for bfloat16 weights that `gyre.weights.codecs.fp8`
             rounded, which are exactly such products. A block that is not (a norm, the file's header) goes as it is

Invariants:
- *lossless*: `decode(encode(x))` is `x`, bit by bit, for whatever bytes; loss is only where a publisher rounds;
- *bounded*: decoding writes nothing beyond the chunk, and reads no more than the chunk could need, whatever came.
  What came is not trusted: anything that does not fit is a WeightMismatch.

A word is 2 bytes for bfloat16 and 4 for float32. Bytes at the end that make no word go as they are. Pure: no files,
no sockets, no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import zstandard
from numpy.typing import NDArray

from gyre.weights.codecs.brought import decode_by, encode_by, is_brought
from gyre.weights.version.manifest import WeightMismatch

Codec = str
CODECS: tuple[Codec, ...] = ("none", "planes", "delta", "fp8")
"""The built-in ones; a job may bring others (`gyre.weights.codecs.brought`)."""

FP8_BLOCK = 128
_RAW_BLOCK = 255
_MOST_PARTS = 255
_SKIP = 0xFFFF
_LEVEL = 1
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Buffer = bytes | bytearray | memoryview


def is_known(codec: object) -> TypeGuard[Codec]:
    """Whether chunks can be encoded by this name, which came over the network."""
    return isinstance(codec, str) and (codec in CODECS or is_brought(codec))


def encode(codec: Codec, raw: Buffer, *, word: int, base: Buffer | None = None) -> bytes | memoryview:
    """`raw` in this codec, which is known; as it is where a codec that the job brought fails. `base` is as long as
    `raw`, and needed for `delta` alone."""
    view = memoryview(raw).cast("B")
    if is_brought(codec):
        own = encode_by(codec, view, word)
        return view if own is None else own
    if codec == "none":
        return view
    if codec == "delta":
        if base is None:
            raise ValueError("a delta needs its base")
        return _encode_delta(view, memoryview(base).cast("B"), word)
    if codec == "planes":
        words, rest = _words(view, word)
        return _pack(*_planes(words), bytes(rest))
    return _encode_fp8(view)


def decode(codec: str, data: Buffer, into: memoryview, *, word: int, base: Buffer | None = None) -> None:
    """Write the chunk that `data` stands for to `into`, whose length is the chunk's. Raises WeightMismatch."""
    try:
        if codec == "none":
            into[:] = memoryview(data).cast("B")
        elif codec == "planes":
            words, rest = _words(into, word)
            *planes, tail = _unpack(data, [len(words)] * word + [len(rest)])
            _join(planes, words)
            rest[:] = tail
        elif codec == "delta":
            if base is None:
                raise WeightMismatch("a delta came for weights that are not here.")
            into[:] = memoryview(base).cast("B")
            for step in _parts(data):
                _apply_delta(step, into, word)
        elif codec == "fp8":
            _decode_fp8(data, into)
        elif is_brought(codec):
            decode_by(codec, memoryview(data).cast("B"), into, word)
        else:
            raise WeightMismatch(f"nothing here decodes {codec!r}.")
    except (ValueError, struct.error, zstandard.ZstdError, IndexError) as error:
        raise WeightMismatch(f"a chunk in {codec!r} cannot be decoded: {error}.") from error


# -- delta ---------------------------------------------------------------------------------------------


def chain(deltas: Sequence[Buffer]) -> bytes | None:
    """Deltas that follow on each other, the oldest first, as one. Nothing is decoded. None where they have more steps
    than a frame has parts: each may be a chain itself, that came from another."""
    steps = [step for delta in deltas for step in _parts(delta)]
    return _frame(steps) if len(steps) <= _MOST_PARTS else None


def _encode_delta(view: memoryview, base: memoryview, word: int) -> bytes:
    new, rest = _words(view, word)
    old, _ = _words(base, word)
    changed = np.flatnonzero(new != old)
    gaps = np.diff(changed, prepend=-1) - 1  # words that stay, before each that changes
    over, gaps = np.divmod(gaps, _SKIP)  # a gap too wide for 16 bits: as many skips before it
    steps = np.full(len(gaps) + int(over.sum()), _SKIP, np.uint16)
    steps[np.cumsum(over + 1) - 1] = gaps
    one = _pack(
        struct.pack("<QQ", len(steps), len(changed)), *_planes(steps), *_planes(new[changed]), bytes(rest)
    )
    return _frame([one])


def _apply_delta(data: Buffer, into: memoryview, word: int) -> None:
    words, rest = _words(into, word)
    parts = _parts(data)
    count, changed = struct.unpack("<QQ", _inflate(parts[0], 16))
    if changed > len(words) or count > changed + len(words) // _SKIP + 1 or len(parts) != 4 + word:
        raise ValueError("more changes than words")
    steps = np.empty(count, np.uint16)
    _join([_inflate(part, count) for part in parts[1:3]], steps)
    values = np.empty(changed, _WORDS[word])
    _join([_inflate(part, changed) for part in parts[3:-1]], values)
    moves = steps.astype(np.int64)
    real = moves != _SKIP
    moves[real] += 1
    at = np.cumsum(moves)[real] - 1
    if len(at) != changed or (changed and at[-1] >= len(words)):
        raise ValueError("changes beyond the end")
    words[at] = values
    rest[:] = _inflate(parts[-1], len(rest))


# -- fp8 ------------------------------------------------------------------------------------------------


def _exact_table() -> NDArray[np.uint8]:
    """The code of each magnitude in bfloat16's bits; `_NO_CODE` for what is none."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    table = np.full(1 << 15, _NO_CODE, np.uint8)
    table[bits] = codes
    return table


_NO_CODE = 127
_EXACT = _exact_table()
_BITS = np.zeros(256, np.uint16)
"""The inverse: bfloat16's bits by code."""
_BITS[_EXACT[_EXACT != _NO_CODE]] = np.flatnonzero(_EXACT != _NO_CODE)
_BITS[128:] = _BITS[:128] | 0x8000

_SCALE_BIAS = 120


def _encode_fp8(view: memoryview) -> bytes:
    words, _ = _words(view, 2)
    whole = len(words) // FP8_BLOCK * FP8_BLOCK
    bits = words[:whole].reshape(-1, FP8_BLOCK)
    magnitude = (bits & 0x7FFF).view(np.int16)
    largest = magnitude.max(axis=1, initial=0)
    exponent = largest >> 7
    scale = (exponent - 135 + ((largest & 127) > 96)).astype(np.int16)  # so that the largest is at most 448
    usable = (exponent > 0) & (exponent < 255) & (np.abs(scale) <= _SCALE_BIAS - 20)
    scale = np.where(usable, scale, 0).astype(np.int16)
    codes = _EXACT[np.maximum(magnitude - (scale << 7)[:, None], 1)]
    codes[magnitude == 0] = 0
    exact = (usable | (largest == 0)) & (codes != _NO_CODE).all(axis=1)
    codes |= (bits >> 8).astype(np.uint8) & 0x80
    scales = np.where(exact, scale + _SCALE_BIAS, _RAW_BLOCK).astype(np.uint8)
    return _pack(scales.tobytes(), codes[exact].tobytes(), bits[~exact].tobytes(), bytes(view[whole * 2 :]))


def _decode_fp8(data: Buffer, into: memoryview) -> None:
    words, _ = _words(into, 2)
    whole = len(words) // FP8_BLOCK * FP8_BLOCK
    parts = _parts(data)
    scales = np.frombuffer(_inflate(parts[0], whole // FP8_BLOCK), np.uint8)
    exact = scales != _RAW_BLOCK
    coded, plain = int(exact.sum()), int((~exact).sum())
    codes = np.frombuffer(_inflate(parts[1], coded * FP8_BLOCK), np.uint8).reshape(-1, FP8_BLOCK)
    raw = np.frombuffer(_inflate(parts[2], plain * FP8_BLOCK * 2), np.uint16).reshape(-1, FP8_BLOCK)
    shift = ((scales[exact].astype(np.int16) - _SCALE_BIAS) << 7).view(np.uint16)
    found = _BITS[codes]
    found += shift[:, None] * (
        (codes & 0x7F) != 0
    )  # what came may be anything: it wraps, and its checksum is wrong
    blocks = words[:whole].reshape(-1, FP8_BLOCK)
    blocks[exact] = found
    blocks[~exact] = raw
    into[whole * 2 :] = _inflate(parts[3], len(into) - whole * 2)


# -- planes and parts -----------------------------------------------------------------------------------


def _words(view: memoryview, word: int) -> tuple[NDArray[Any], memoryview]:
    """The words of `view`, sharing its memory, and the bytes after the last whole one."""
    end = view.nbytes // word * word
    return np.frombuffer(view[:end], _WORDS[word]), view[end:]


def _planes(words: NDArray[Any]) -> list[bytes]:
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.dtype.itemsize)
    return [octets[:, at].tobytes() for at in range(words.dtype.itemsize)]


def _join(planes: list[bytes], words: NDArray[Any]) -> None:
    octets = words.view(np.uint8).reshape(-1, words.dtype.itemsize)
    for at, plane in enumerate(planes):
        octets[:, at] = np.frombuffer(plane, np.uint8)


def _pack(*parts: Buffer) -> bytes:
    squeezer = zstandard.ZstdCompressor(level=_LEVEL)
    return _frame([squeezer.compress(part) for part in parts])


def _frame(parts: Sequence[Buffer]) -> bytes:
    """At most `_MOST_PARTS` of them; `_parts` gives them back."""
    return b"".join(
        [struct.pack("<B", len(parts)), *(struct.pack("<Q", len(part)) for part in parts), *parts]
    )


def _parts(data: Buffer) -> list[memoryview]:
    view = memoryview(data).cast("B")
    count = view[0]
    sizes = struct.unpack_from(f"<{count}Q", view, 1)
    at, parts = 1 + 8 * count, []
    for size in sizes:
        if size > view.nbytes - at:
            raise ValueError("it ends early")
        parts.append(view[at : at + size])
        at += size
    return parts


def _inflate(part: memoryview, size_bytes: int) -> bytes:
    """Exactly so many bytes, and never more, whatever `part` claims."""
    if size_bytes == 0:
        return b""
    if zstandard.get_frame_parameters(part).content_size != size_bytes:
        raise ValueError("it has another size")
    return zstandard.ZstdDecompressor().decompress(part, max_output_size=size_bytes)


def _unpack(data: Buffer, sizes: list[int]) -> list[bytes]:
    parts = _parts(data)
    if len(parts) != len(sizes):
        raise ValueError(f"{len(parts)} parts, and {len(sizes)} are needed")
    return [_inflate(part, size) for part, size in zip(parts, sizes, strict=True)]
