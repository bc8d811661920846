"""A client's JSON, read key by key: each key is of its form, or the request is refused in a sentence that names it. One
table for each body says which keys there are, and what becomes of each: it is taken, it is passed over at the values
that change nothing, or it is refused.

Invariants:
- *nothing else decides*: a dialect reads the keys that its table takes, and no others;
- *false is not silence*: a key that is not taken passes with its own neutral value and no other. Null is silence: the
  key is as if it were left out, unless its row says otherwise.

This module must not know what a taken key means, or of sockets.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.errors import GyreError, nearest


class RequestRefused(GyreError):
    """A request that is not taken. `details` has `status`, of HTTP, and `reason`, a stable code; `param` is the key
    that is at fault, where it is one."""

    code = "request_refused"

    @property
    def status(self) -> int:
        return int(self.details["status"])

    @property
    def reason(self) -> str:
        return str(self.details["reason"])

    @property
    def param(self) -> str:
        return str(self.details.get("param", ""))


def refused(status: int, reason: str, message: str, hint: str = "", *, param: str = "") -> RequestRefused:
    details = {"status": status, "reason": reason, **({"param": param} if param else {})}
    return RequestRefused(message, hint=hint, details=details)


def invalid(message: str, param: str = "", *, page: str) -> RequestRefused:
    """A request that is not of its form, which `page` of the documentation has."""
    return refused(422, "invalid", message, f"See {page}.", param=param)


class _Anything:
    """A neutral value of keys that are about the client."""


ANYTHING = _Anything()


@dataclass(frozen=True, slots=True)
class Key:
    """`passes` are the values that change nothing. `says` is what a taken key asks for, why another one passes, or what
    to do in place of one that is refused."""

    name: str
    is_taken: bool = False
    passes: tuple[Any, ...] = ()
    says: str = ""
    is_null_silent: bool = True


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one body. `server` is who takes it, in a sentence; `page` has its form."""

    of: str
    rows: Mapping[str, Key]
    server: str
    page: str

    def check_left(self, name: str, value: Any, path: str) -> None:
        """A key that was not taken: raises RequestRefused unless it changes nothing."""
        row = self.rows.get(name)
        if value is None and (row is None or row.is_null_silent):
            return
        if row is None:
            near = nearest(name, [key.name for key in self.rows.values() if key.is_taken])
            raise refused(
                422,
                "unsupported",
                f"{path}: {shown(value)} given, which {self.server} does not know; {near or _LEAVE}",
                param=path,
            )
        if not any(one is ANYTHING or _is_same(value, one) for one in row.passes):
            but = f" but {_listed(row.passes)}" if row.passes else ""
            raise refused(
                422,
                "unsupported",
                f"{path}: {shown(value)} given, and {self.server} takes none{but}.",
                row.says or _LEAVE,
                param=path,
            )


_LEAVE = "Leave it out."


def shown(value: Any) -> str:
    return repr(value)[:60]


def _is_same(value: Any, neutral: Any) -> bool:
    """A truth value is no number, and 1.0 is 1."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    if isinstance(value, int | float) and isinstance(neutral, int | float):
        return value == neutral
    return type(value) is type(neutral) and bool(value == neutral)


def json_text(value: Any) -> str:
    """The neutral value as a client writes it."""
    if value is ANYTHING:
        return "any"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(map(json_text, values))


def takes(*rows: tuple[str, str]) -> list[Key]:
    return [Key(name, is_taken=True, says=says) for name, says in rows]


def passes(*values: Any, says: str = "") -> Any:
    def rows(*names: str) -> list[Key]:
        return [Key(name, passes=values, says=says) for name in names]

    return rows


def table(of: str, *groups: list[Key], server: str, page: str) -> Keys:
    return Keys(of, {key.name: key for group in groups for key in group}, server, page)


class Body:
    """A mapping of a client's, whose keys are taken one by one; what is left has to change nothing."""

    def __init__(self, keys: Keys, values: Any, path: str = "") -> None:
        self._keys = keys
        self._path = path
        if not isinstance(values, dict):
            raise self.invalid(f"{path or 'the body'}: {shown(values)} given, expected an object.", path)
        self._values = dict(values)

    def at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def invalid(self, message: str, param: str = "") -> RequestRefused:
        return invalid(message, param, page=self._keys.page)

    def wrong(self, key: str, value: Any, expected: str) -> RequestRefused:
        return self.invalid(f"{self.at(key)}: {shown(value)} given, expected {expected}.", self.at(key))

    def has(self, key: str) -> bool:
        """Whether it is there, and not null where that is silence."""
        return key in self._values and not (self._values[key] is None and self._keys.rows[key].is_null_silent)

    def any(self, key: str) -> Any:
        row = self._keys.rows[key]
        if not row.is_taken:
            raise KeyError(key)
        if not row.is_null_silent and key in self._values and self._values[key] is None:
            raise self.wrong(key, None, f"a number: {row.says}")
        return self._values.pop(key, None)

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

    def listed(self, key: str, most: int, of: str) -> list[Any]:
        """A list of at most `most` of what `of` says; none is an empty one."""
        value = self.any(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(key, value, f"a list of at most {most} {of}")
        return value

    def ids(self, key: str, most: int) -> list[int]:
        return token_ids(self.listed(key, most, "token ids"), self.at(key), page=self._keys.page)

    def prompt(self, key: str, most: int) -> NDArray[np.int32]:
        """int32 `[p]`, not empty. A list of a thousand numbers that waits for its answer would be gone through by each
        run of the garbage collector; an array is not."""
        ids = self.listed(key, most, "token ids")
        if not ids:
            raise self.wrong(key, ids, "the prompt's token ids")
        try:
            packed = np.frombuffer(array("i", ids), np.int32)
        except (TypeError, OverflowError):
            packed = None  # it is said below of which it is
        if packed is None or int(packed.min()) < 0 or bool in set(map(type, ids)):
            token_ids(ids, self.at(key), page=self._keys.page)
        assert packed is not None, "what is no token id was refused"
        return packed

    def end(self) -> None:
        """Raises RequestRefused for the first key that was not taken and changes something."""
        for key, value in self._values.items():
            self._keys.check_left(key, value, self.at(key))


MOST_STOPS = 256
"""Token ids that end a sample, of one request."""
MOST_NEW_TOKENS = 1 << 20
"""Of one sample."""


def drawing(body: Body) -> dict[str, Any]:
    """How tokens are drawn, of the keys that all bodies with an engine's settings call alike: those that are given,
    each in its bounds. A top_k of -1 or 0 is off, which is -1."""
    given = [name for name in _DRAWN if body.has(name)]
    read = {
        "temperature": body.number("temperature", 1.0, 1e4),
        "top_p": body.number("top_p", 1.0, 1.0, above=0.0),
        "top_k": body.whole("top_k", -1, -1, 2**31 - 1) or -1,
        "min_p": body.number("min_p", 0.0, 1.0),
        "stop_token_ids": body.ids("stop_token_ids", MOST_STOPS),
        "ignore_eos": body.flag("ignore_eos"),
    }
    return {name: read[name] for name in given}


_DRAWN = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos")


def token_ids(value: list[Any], path: str, *, page: str) -> list[int]:
    """Raises RequestRefused for what is no token id."""
    for one in value:
        if type(one) is not int or not 0 <= one < 2**31:
            raise invalid(f"{path}: {shown(one)} is no token id.", path, page=page)
    return value


def decoded(body: bytes, *, page: str) -> Any:
    """The body's JSON. Raises RequestRefused."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The body is no JSON: {str(error)[:200]}.", page=page) from None


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer with this status; `param` is the key that is at fault."""
    kind = (
        "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    )
    return {
        "code": code,
        "message": message,
        "error": {"message": message, "type": kind, "code": code, "param": param},
    }
