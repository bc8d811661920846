"""Which request of a session is which, without an id of the client's: no SDK sends one.

A request is known by its route, its bytes, and which time in the session it is that these bytes are asked for. An SDK
that asks again sends the same bytes and a count of its retries; others send no mark, but an answer that never left was
heard by nobody. An agent that is run again from its beginning sends the same requests in the same order, and a new
claim of its session says so: its numbers begin anew, and find the turns that are in the ledger.

Invariants:
- *asked again is the same*: while no answer has left, the same bytes are the same request, whoever sends them. So two
  equal requests at once are one; who wants two answers makes them differ (`metadata` will do);
- *heard is over*: after the answer has left, the same bytes without a count are the next request.

This module must not know of sockets, turns or time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

NUMBER = "x-gyre-number"
"""Header of a client that counts by itself: which time in the session it is, from 0, that it asks for these bytes."""


class Repeats:
    """The requests of one session. `known` are the keys that are in the ledger, of a manager that begins anew within a
    claim: it does not know which answers left, so that the newest of each is taken for unheard."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._numbers: dict[str, int] = {}
        """Of a route and a body, the number of the newest request."""
        self._left: set[str] = set()
        for key in known:
            digest, _, number = key.rpartition("-")
            self._numbers[digest] = max(int(number), self._numbers.get(digest, 0))

    def key(self, path: str, body: bytes, retry_count: int = 0, number: int | None = None) -> str:
        """The request's key, `DIGEST-NUMBER`. `path` is the route without the session's prefix, `retry_count` what the
        client says in `x-stainless-retry-count`, 0 where it says nothing; `number` is that of a client that counts by
        itself, and knows what it heard."""
        digest = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()
        if number is not None:
            self._numbers[digest] = max(number, self._numbers.get(digest, 0))
            return f"{digest}-{number}"
        number = self._numbers.setdefault(digest, 0)
        if not retry_count and f"{digest}-{number}" in self._left:
            self._left.discard(f"{digest}-{number}")  # an older number is never asked for again
            number = self._numbers[digest] = number + 1
        return f"{digest}-{number}"

    def left(self, key: str) -> None:
        """The whole answer was sent."""
        digest, _, number = key.rpartition("-")
        if self._numbers.get(digest) == int(number):
            self._left.add(key)

    def claimed(self) -> None:
        """Another claim of the session: its agent is run again from the beginning."""
        self._numbers.clear()
        self._left.clear()
