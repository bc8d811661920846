"""Values as they cross from one process to the next: pickled, with the buffers that the pickle refers to."""

from __future__ import annotations

import pickle
from typing import Any

Packed = tuple[bytes, tuple[bytes, ...]]
"""A pickle and the buffers that it refers to."""


def pack(value: Any) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, tuple(bytes(buffer.raw()) for buffer in buffers)


def unpack(packed: Packed) -> Any:
    """Arrays are backed by immutable bytes, and so read-only."""
    return pickle.loads(packed[0], buffers=packed[1])
