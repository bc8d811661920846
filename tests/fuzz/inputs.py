"""Hostile input: bytes that are nothing, good bytes that were damaged, good values of which a part is another."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgpack

LARGE = (2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
HEADS = (
    b"\xdd\xff\xff\xff\xff",  # lists, maps, bytes and text that are said to be four gigabytes long
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xd6\xff\0\0\0\0",  # a timestamp
    b"\xc1",  # never used
)


def damaged(data: bytes, draw: Random) -> bytes:
    """What a bad line, or a bad peer, made of good bytes."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        at = draw.randrange(len(out)) if out else 0
        match draw.randrange(9):
            case 0 if out:
                out[at] ^= 1 << draw.randrange(8)
            case 1 if out:
                out[at] = draw.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xDF, 0xFF))
            case 2:
                del out[at:]
            case 3:
                del out[at : at + draw.randrange(1, 9)]
            case 4:
                out[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 5:
                out[at:at] = out[at : at + draw.randrange(1, 33)]
            case 6:
                out[at : at + 5] = draw.choice(HEADS)
            case 7:  # a length, or a number, that is another
                size = draw.choice((1, 2, 4, 8))
                value = draw.choice((0, 1, -1, 1 << 60, draw.getrandbits(8 * size))) % (1 << 8 * size)
                out[at : at + size] = value.to_bytes(size, draw.choice(("big", "little")))  # type: ignore[arg-type]
            case _:
                other = draw.randrange(len(out)) if out else 0
                size = draw.randrange(1, 9)
                out[at : at + size], out[other : other + size] = (
                    out[other : other + size],
                    out[at : at + size],
                )
    return bytes(out)


def noise(draw: Random, most: int = 64) -> bytes:
    """Bytes that nobody made: random ones, deep ones, or a head that lies about what follows."""
    match draw.randrange(4):
        case 0:
            return draw.choice(HEADS) + draw.randbytes(draw.randrange(8))
        case 1:
            return draw.choice((b"\x91", b"\x81\xa0", b"[", b'{"":')) * draw.choice((10, 600, 3000))
        case _:
            return draw.randbytes(draw.randrange(most))


def hostile(draw: Random, *, wide: bool = False, depth: int = 0) -> Any:
    """A value where another one belongs. `wide` has what JSON can say and msgpack cannot."""
    match draw.randrange(14 if depth < 3 else 10):
        case 0:
            return draw.choice((None, True, False))
        case 1:
            return draw.choice((-1, 0, 1, *LARGE))
        case 2:
            return -draw.choice((1, *LARGE[:-2]))
        case 3:
            return draw.choice((float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 5e-324, 1.5))
        case 4:
            return draw.choice(("", "\0", "a b", "../../x", "\n", "🜁", "all", "-1", "f" * 300, "x" * 70_000))
        case 5 if wide:
            return draw.choice(("\ud800", "\udfff", 10**400, -(10**400), 10**4000))
        case 6 if not wide:
            return draw.choice((b"", b"\0", b"\xff" * 7, b"\0" * 4096))
        case 7:
            return draw.getrandbits(draw.choice((8, 16, 32, 63)))
        case 8:
            return draw.random() * 10 ** draw.randrange(-9, 9)
        case 9:
            return deep(draw, draw.choice((3, 60, 400)))
        case 10:
            return {}
        case 11:
            return []
        case 12:
            return [hostile(draw, wide=wide, depth=depth + 1) for _ in range(draw.randrange(4))]
        case _:
            keys = ("", "a", "data", "shape", "op")
            return {draw.choice(keys): hostile(draw, wide=wide, depth=depth + 1) for _ in range(3)}


def deep(draw: Random, depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if draw.random() < 0.9 else {"a": value}
    return value


def twisted(value: Any, draw: Random, *, wide: bool = False) -> Any:
    """A copy of plain data of which one part or a few are missing, doubled, or something else."""
    out = _copied(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(out)
        if not places:
            return hostile(draw, wide=wide)
        at, key = draw.choice(places)
        match draw.randrange(8):
            case 0:
                del at[key]
            case 1 if isinstance(at, dict):
                at[draw.choice(("more", "", "size_bytes", "__nd__"))] = hostile(draw, wide=wide)
            case 1 | 2 if isinstance(at, list):
                at.insert(key, draw.choice((at[key], hostile(draw, wide=wide))))
            case 3:
                other, where = draw.choice(places)
                if not isinstance(at[key], dict | list) and where in _keys(other):
                    at[key] = _copied(other[where])
            case 4 if isinstance(at[key], str | bytes):
                at[key] = _other_text(at[key], draw)
            case 5 if type(at[key]) is int:
                at[key] += draw.choice((-1, 1, 1 << 16, 1 << 32))
            case _:
                at[key] = hostile(draw, wide=wide)
    return out


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return [[]]


def _keys(at: Any) -> Sequence[Any]:
    return list(at) if isinstance(at, dict) else range(len(at))


def _other_text(text: Any, draw: Random) -> Any:
    if isinstance(text, bytes):
        return damaged(text, draw)
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(("", "-", "\0", "é", text)) + text[at + 1 :]


def _places(value: Any, most: int = 400) -> list[tuple[Any, Any]]:
    """Each container in plain data with each of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    open_ = [value]
    while open_ and len(found) < most:
        at = open_.pop()
        if isinstance(at, dict | list):
            found += [(at, key) for key in _keys(at)]
            open_ += at.values() if isinstance(at, dict) else at
    return found


def packed(value: Any) -> bytes:
    """As msgpack. What that cannot say is left out: the bytes are then those of nothing."""
    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except (ValueError, OverflowError, TypeError):
        return b"\xc0"


def as_json(value: Any) -> bytes:
    """As JSON, with NaN and half characters where they are."""
    try:
        return json.dumps(value).encode()
    except (ValueError, TypeError, RecursionError):
        return b"null"


def hostile_json(good: Any, draw: Random) -> bytes:
    """JSON of which a part is not right, or what is none."""
    match draw.randrange(10):
        case 0:
            return noise(draw)
        case 1:
            return draw.choice((b"[", b'{"a":', b'{"files":[')) * draw.choice((900, 20_000))
        case 2 | 3:
            return damaged(as_json(good), draw)
        case 4:
            return as_json(good).replace(b"0", draw.choice((b"1e999", b"-0", b"NaN", b"9" * 5000)), 1)
        case 5:
            return as_json(hostile(draw, wide=True))
        case _:
            return as_json(twisted(good, draw, wide=True))


def some_of(draw: Random, *ways: Callable[[], bytes]) -> bytes:
    return draw.choice(ways)()
