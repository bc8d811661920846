"""Codecs that a job brings itself, by the name that goes over the wire.

Invariant *a codec of one's own costs bytes at most*: where it fails to encode, the bytes go as they are; what it
decodes is compared with the chunk's checksum like everything that came.
"""

from __future__ import annotations

import traceback
from typing import Protocol

from gyre.weights.version.manifest import WeightMismatch


class ChunkCodec(Protocol):
    """What `weights.codec: module:object` names. `word` is the size in bytes of the chunk's numbers, 2 for bfloat16.

    Both methods are called by several threads at a time, and depend on their arguments alone.
    """

    def encode(self, raw: memoryview, *, word: int) -> bytes:
        """Fewer bytes that stand for `raw`."""
        ...

    def decode(self, data: memoryview, into: memoryview, *, word: int) -> None:
        """Write what `data` stands for to `into`, which is as long as `raw` was, and nothing beyond. `data` came over
        the network and is not to be trusted: raise ValueError for what cannot be decoded."""
        ...


_BROUGHT: dict[str, ChunkCodec] = {}


def bring(name: str, codec: ChunkCodec) -> None:
    """From now on chunks may come and go in this codec."""
    _BROUGHT[name] = codec


def is_brought(name: str) -> bool:
    return name in _BROUGHT


def encode_by(name: str, raw: memoryview, word: int) -> bytes | None:
    """None where the codec failed, which stderr says."""
    try:
        return bytes(_BROUGHT[name].encode(raw, word=word))
    except Exception:
        traceback.print_exc()
        return None


def decode_by(name: str, data: memoryview, into: memoryview, word: int) -> None:
    """Raises WeightMismatch."""
    try:
        _BROUGHT[name].decode(data, into, word=word)
    except Exception as error:
        raise WeightMismatch(f"a chunk in {name!r} cannot be decoded: {error}.") from error
