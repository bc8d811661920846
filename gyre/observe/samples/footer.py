"""What a Parquet file says of itself under a key, read from its end and nothing else parsed.

pyarrow parses all that an end says of row groups and columns, which takes twenty times as long as reading it; a job has
thousands of files.

Invariant *the same*: what is found is what pyarrow finds. What is not recognised is left to pyarrow.
"""

from __future__ import annotations

import os

MAGIC = b"PAR1"
_TAIL = 8
"""Bytes behind the footer: its length, and the magic."""

_AT_FIRST = 1 << 14
"""Bytes that are read at first: most footers are shorter."""

_STRING = b"\x18"
"""Before each string of a pair of key and value, in Thrift's compact protocol: the next field, and it is binary."""

_STOP = 0


def footer_of(path: str) -> bytes | None:
    """The footer as it stands in the file; None where the file does not end as Parquet does. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        end = os.pread(file, _AT_FIRST, max(size - _AT_FIRST, 0))
        if len(end) < _TAIL or not end.endswith(MAGIC):
            return None
        length = int.from_bytes(end[-_TAIL : -len(MAGIC)], "little")
        if length + _TAIL > size:
            return None
        if length + _TAIL > len(end):
            end = os.pread(file, length + _TAIL, size - length - _TAIL)
        return end[-length - _TAIL : -_TAIL]
    finally:
        os.close(file)


def value_in(footer: bytes, key: bytes) -> bytes | None:
    """The value of the last pair with this key; None where there is none that is whole."""
    pair = _STRING + _varint(len(key)) + key + _STRING
    found = footer.rfind(pair)
    if found < 0:
        return None
    at = found + len(pair)
    length = shift = 0
    while at < len(footer):
        byte = footer[at]
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    end = at + length
    return footer[at:end] if end < len(footer) and footer[end] == _STOP else None


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
