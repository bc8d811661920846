"""What a cell of a data set is in a prepared folder: a value that JSON can hold, and an answer.

| in the file | in `meta` |
| --- | --- |
| text, integers, truth values, lists, mappings, null | the same |
| NaN, Parquet's null | null |
| an integer beyond 64 bits, a decimal, a UUID | its text |
| a date, a time, both | its ISO 8601 text |
| a duration | its seconds |

Bytes, infinities and texts with half a character cannot be held: whoever asks gets the reason, and names row and
column.

This module must not know which column a value is from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

_DEEPEST = 64
"""Lists in lists in mappings, and so on. Msgpack, which carries groups between processes, ends far beyond that."""
_INTEGERS = range(-(2**63), 2**63)
_EXACT = 2.0**53
"""Up to here a float is the integer that it looks like."""


class Unholdable(ValueError):
    """A value that a prepared folder cannot hold. Its text says what it is, as in "the column holds …"."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON has it, by the table above. Raises Unholdable."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, int):
        return value if value in _INTEGERS else str(value)
    if isinstance(value, float):
        return _finite(value)
    if depth == _DEEPEST:
        raise Unholdable(f"lists and mappings in each other, more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return {whole_text(str(key)): plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return None if value.is_nan() else format(value, "f")
    if isinstance(value, UUID):
        return str(value)
    raise Unholdable(f"{type(value).__name__}, which a reward cannot be given")


def whole_text(text: str) -> str:
    """The same text. Raises Unholdable if it has half a character, which no tokenizer and no file takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise Unholdable(
                f"half a character, {ascii(half)[1:-1]} (a lone surrogate), at place {error.start + 1}"
            ) from None
    return text


def answer_of(value: Any) -> Any:
    """The answer that a cell gives: a text as it is, a number's text (72.0 is `72`), a truth value, a list or a
    mapping. None for what holds no answer: null, NaN, blanks, and lists and mappings of such. Raises Unholdable."""
    if holds_nothing(value):
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        _finite(value)
        return str(int(value)) if value.is_integer() and abs(value) <= _EXACT else repr(value)
    if isinstance(value, Decimal):
        return str(int(value)) if value == value.to_integral_value() else format(value, "f")
    found = plain(value)
    return str(found) if isinstance(found, int | float) else found


def holds_nothing(value: Any) -> bool:
    """Whether a value is null, NaN or blank, or a list or mapping that holds nothing else."""
    if value is None:
        return True
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float | Decimal):
        return math.isnan(value)
    if isinstance(value, Mapping):
        return all(holds_nothing(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(holds_nothing(one) for one in value)
    return False


def _finite(value: float) -> float | None:
    if math.isinf(value):
        raise Unholdable("an infinite number, which JSON does not have")
    return None if math.isnan(value) else value
