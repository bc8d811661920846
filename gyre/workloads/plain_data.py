"""Plain data: what JSON can hold, made of whatever a user's code hands over.

Fields of progress, bodies of reports, results and evidence come out of users' code. They end up in the journal, in
REST answers and on the page, none of which takes a tensor or a NaN. `plain` makes them:

    given                                        becomes
    None, bool, int of 64 bits, finite float     itself
    text                                         itself, half a surrogate pair as `\\udc80`, what is too long cut in
                                                 its middle
    a float that is not finite                   "nan", "inf" or "-inf", which `float()` reads back
    a larger int                                 its digits as text
    a scalar or a small array of numpy or torch  its number, or lists of them
    a larger array                               a text with its type, dtype and shape
    list, tuple                                  a list
    dict                                         a dict whose keys are texts
    anything else                                its `repr`, cut

Invariants:
- *never raises*: whatever an object does when it is asked for its value;
- *bounded*: what comes out has about `limit` characters of JSON at the most, and says how much is left out;
- *plain stays plain*: plain data within the limits comes out equal.

This module must not import numpy or torch: it knows their objects by what they can do.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

PLAIN_LIMIT = 2**20
"""Characters of JSON of one piece of plain data: a thousand rollout instances' status is half of it."""

TEXT_LIMIT = 2**16
"""Characters of one text: a traceback, a stack of every thread."""

DEPTH_LIMIT = 24
"""Containers in each other; deeper ones become texts. Data that holds itself ends here."""

ARRAY_LIMIT = 1000
"""Elements of an array that are worth reading."""

_SHORT = 1000
"""Characters of a key, or of an object's repr."""

_INT_LIMIT = 2**63
_SCALARS = (bool, int, float, str)
_LEFT_OUT = "…"

_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = _repr.maxlong = _SHORT


def plain(value: Any, *, limit: int = PLAIN_LIMIT) -> Any:
    """The value as plain data."""
    return measured(value, limit=limit)[0]


def plain_fields(value: Any, *, limit: int = PLAIN_LIMIT) -> dict[str, Any]:
    """The value as a plain dict; what is no mapping is its one entry, `value`."""
    made = plain(value if isinstance(value, Mapping) else {"value": value}, limit=limit)
    return made if isinstance(made, dict) else {"value": made}  # a mapping that cannot be read is a text


def measured(value: Any, *, limit: int = PLAIN_LIMIT) -> tuple[Any, int]:
    """The value as plain data, and about how many characters of JSON it has."""
    maker = _Maker(limit)
    made = maker.make(value, 0)
    return made, limit - maker.left


def plain_text(value: Any, *, limit: int = TEXT_LIMIT) -> str:
    """The value as text that every database and client takes; of a long one its beginning and its end."""
    text = str.__str__(value) if issubclass(type(value), str) else _repr_of(value)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    note = f"\n… {len(text) - limit} characters and more are left out …\n"
    kept = max(0, limit - len(note))
    end = kept // 3
    return text[: kept - end] + note + text[len(text) - end :]


class _Maker:
    """Makes one piece of plain data. `left` is how many characters of it may still come."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def make(self, value: Any, depth: int) -> Any:
        # By `type`: what an object says of its class is code of its own.
        kind = type(value)
        if kind is str and len(value) <= _SHORT and value.isascii():  # what most of it is, and fast
            self.left -= len(value) + 4
            return value
        if value is None or issubclass(kind, _SCALARS):
            made = self._scalar(value, kind)
            self.left -= len(made) + 4 if isinstance(made, str) else 8
            return made
        try:
            if depth < DEPTH_LIMIT:
                if issubclass(kind, Mapping):
                    return self._dict(value, depth)
                if issubclass(kind, (list, tuple)):
                    return self._list(value, depth)
                if hasattr(value, "tolist") and hasattr(value, "shape"):
                    return self._array(value, depth)
        except Exception:  # an object of the user's, or one that another thread changes: its repr has to do
            pass
        return self.make(_repr_of(value), depth)

    def _scalar(self, value: Any, kind: type) -> bool | int | float | str | None:
        """Of exact types: numpy's float64 is a float, and is not what comes back from JSON."""
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if issubclass(kind, str):
            return plain_text(value, limit=min(TEXT_LIMIT, max(self.left, _SHORT)))
        if issubclass(kind, int):
            number = int.__int__(value)
            return number if -_INT_LIMIT <= number < _INT_LIMIT else _digits(number)
        real = float.__float__(value)
        return real if math.isfinite(real) else str(real)

    def _dict(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        count = len(value)
        for done, (key, inner) in enumerate(islice(value.items(), count)):
            if self.left <= 0:
                found[_LEFT_OUT] = f"{count - done} of {count} entries are left out"
                break
            name = self._name(key)
            self.left -= len(name) + 4
            found[name] = self.make(inner, depth + 1)
        return found

    @staticmethod
    def _name(key: Any) -> str:
        if type(key) is str and len(key) <= _SHORT and key.isascii():
            return key
        name = key if issubclass(type(key), str) else str(_Maker(_SHORT).make(key, DEPTH_LIMIT))
        return plain_text(name, limit=_SHORT)

    def _list(self, value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        found: list[Any] = []
        for done, inner in enumerate(value):
            if self.left <= 0:
                found.append(f"{_LEFT_OUT} {len(value) - done} of {len(value)} entries are left out")
                break
            found.append(self.make(inner, depth + 1))
        return found

    def _array(self, value: Any, depth: int) -> Any:
        shape = tuple(int(size) for size in value.shape)
        if math.prod(shape) <= ARRAY_LIMIT:
            return self.make(value.tolist(), depth + 1)
        return self.make(f"{type(value).__name__} of {value.dtype}, shape {shape}", depth)


def _repr_of(value: Any) -> str:
    try:
        return plain_text(str(_repr.repr(value)), limit=_SHORT)
    except Exception as error:  # reprlib hears most of them itself, of a user's `__repr__` that raises
        return f"<an object whose repr raised {type(error).__name__}>"


def _digits(number: int) -> str:
    try:
        return str(number)
    except ValueError:  # Python writes thousands of digits in hexadecimal only
        return plain_text(hex(number), limit=_SHORT)
