"""The cookie by which a browser shows the token that it was given once.

A page cannot send an `Authorization` header with a link, an image or a stream of events, and it should not keep a token
where its scripts can read it.

Invariants:
- *the cookie is not the token*: it holds an end and a MAC of it under the token, from which the token does not follow;
- *a restart forgets nobody*: nothing is kept here, so a master that comes back under the same token knows its browsers;
- *another token, another cookie*: browsers send cookies to every port of a host, so the name distinguishes tokens.

The clock is an argument: `now` is in seconds since 1970.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

LASTS_S = 7 * 24 * 3600.0
"""A working week and its week-end; then the page asks for the token again."""

_PURPOSE = b"gyre page session"


class SessionCookies:
    """The cookies of one `token`."""

    def __init__(self, token: bytes, *, lasts_s: float = LASTS_S) -> None:
        self._key = hmac.digest(token, _PURPOSE, sha256)
        self.name = f"gyre_session_{hmac.digest(self._key, b'name', sha256).hex()[:12]}"
        self.lasts_s = lasts_s

    def make(self, now: float) -> str:
        """The value of a cookie that is good for `lasts_s` from now on."""
        until = str(int(now + self.lasts_s))
        return f"{until}.{self._mac(until)}"

    def is_valid(self, header: bytes, now: float) -> bool:
        """Whether a `Cookie` header holds one of these cookies that is still good."""
        for part in header.split(b";"):
            name, _, value = part.strip().partition(b"=")
            if name == self.name.encode() and self._is_good(value, now):
                return True
        return False

    def _is_good(self, value: bytes, now: float) -> bool:
        until, _, mac = value.partition(b".")
        if not until.isdigit() or len(until) > 12:
            return False
        is_ours = hmac.compare_digest(mac, self._mac(until.decode()).encode())
        return is_ours and now < int(until)

    def _mac(self, until: str) -> str:
        return hmac.digest(self._key, until.encode(), sha256).hex()
