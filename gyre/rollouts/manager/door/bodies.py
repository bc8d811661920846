"""A client's JSON, read key by key: each is of its form, or refused in a sentence that names it.

This module must not know what a key means.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.rollouts.manager.door.keys import Keys, invalid, shown
from gyre.rollouts.plane.door_ledger import DoorRefused


class Body:
    """A mapping of a client's, whose keys are taken one by one; what is left has to change nothing."""

    def __init__(self, keys: Keys, values: Any, path: str = "") -> None:
        if not isinstance(values, dict):
            raise invalid(f"{path or 'the body'}: {shown(values)} given, expected an object.", path)
        self._keys = keys
        self._values = dict(values)
        self._path = path

    def at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def any(self, key: str) -> Any:
        row = self._keys.rows[key]
        if not row.is_taken:
            raise KeyError(key)
        if not row.is_null_silent and key in self._values and self._values[key] is None:
            raise self.wrong(key, None, f"a number: {row.says}")
        return self._values.pop(key, None)

    def wrong(self, key: str, value: Any, expected: str) -> DoorRefused:
        return invalid(f"{self.at(key)}: {shown(value)} given, expected {expected}.", self.at(key))

    def text(self, key: str) -> str | None:
        value = self.any(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "text")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.any(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return default if value is None else value

    def whole(self, key: str, default: int | None, least: int, most: int) -> int:
        value = self.any(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, value, f"a number from {least} to {most}")
        return value

    def number(self, key: str, default: float, most: float, *, above: float | None = None) -> float:
        value = self.any(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 <= value <= most:  # neither is a NaN
            raise self.wrong(key, value, f"a number from 0 to {most:g}")
        if above is not None and value <= above:
            raise self.wrong(key, value, f"more than {above:g}")
        return float(value)

    def ids(self, key: str, most: int) -> list[int]:
        value = self.any(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(key, value, f"a list of at most {most} token ids")
        return token_ids(value, self.at(key))

    def end(self) -> None:
        """Raises DoorRefused for the first key that was not taken and changes something."""
        for key, value in self._values.items():
            self._keys.check_left(key, value, self.at(key))


def token_ids(value: list[Any], path: str) -> list[int]:
    for one in value:
        if type(one) is not int or not 0 <= one < 2**31:
            raise invalid(f"{path}: {shown(one)} is no token id.", path)
    return value


def decoded(body: bytes) -> Any:
    """The body's JSON. Raises DoorRefused."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The body is no JSON: {str(error)[:200]}.") from None
