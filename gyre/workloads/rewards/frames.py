"""Frames between the reward pool and its processes: a length (4 bytes, big-endian) and msgpack."""

from __future__ import annotations

import os
import struct
from typing import Any

import msgpack

LARGEST_ANSWER = 64 << 20
"""Bytes of an answer. A request is as large as its texts are."""

_LENGTH = struct.Struct(">I")
_READ = 1 << 20


class StrangeFrame(Exception):
    """Bytes that no process of the pool writes."""


def packed(content: Any) -> bytes:
    data: bytes = msgpack.packb(content, default=_plain)
    return _LENGTH.pack(len(data)) + data


def write_all(fd: int, data: bytes) -> None:
    """Write to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_one(fd: int) -> Any:
    """Read one frame from a blocking descriptor. Raises EOFError if the other side is gone."""
    (size,) = _LENGTH.unpack(_exactly(fd, _LENGTH.size))
    return msgpack.unpackb(_exactly(fd, size), strict_map_key=False)


class Incoming:
    """What has come from a descriptor that does not block, until a frame is whole."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = bytearray()

    def read(self) -> Any | None:
        """The next frame, or None if it is not whole yet. Raises EOFError, StrangeFrame."""
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        self._data += data
        if len(self._data) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._data)
        if size > LARGEST_ANSWER or len(self._data) > _LENGTH.size + size:  # one question has one answer
            raise StrangeFrame
        if len(self._data) < _LENGTH.size + size:
            return None
        whole = bytes(self._data[_LENGTH.size :])
        self._data.clear()
        try:
            return msgpack.unpackb(whole, strict_map_key=False)
        except ValueError as error:  # msgpack's errors are of this kind
            raise StrangeFrame from error


def _exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = os.read(fd, min(_READ, size - len(data)))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _plain(value: Any) -> Any:
    """NumPy's arrays and scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a group's meta holds a {type(value).__name__}, which is not plain data")
