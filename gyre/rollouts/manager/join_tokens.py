"""Who may dial the rollout manager as what: the job's own secret, and the join tokens that the journal has.

Invariants:
- *an instance and nothing else*: a join token admits an instance; it never is the trainer, sees the plane's status, or
  drains what joined otherwise;
- *what its scopes say and nothing else*: a key of a fleet's door asks for samples, or publishes, and admits no
  instance unless it may `join`;
- *hashed and compared in constant time*: a token is known by its SHA-256, and how long a refusal takes says nothing;
- *valid now*: a caller is looked at again for as long as it is connected; a revoked or expired token is no longer one.

This module must not know about sockets, frames or the store.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre.config import DEFAULT_TOKEN, JOIN_SCOPE
from gyre.errors import Unauthorized
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.protocol.credentials import digest_of

SCHEME = "Bearer "

UNKNOWN = "The token is not one of this job."


class UnknownToken(Unauthorized):
    """A token that is none of those that were read: it may be newer."""


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    digest: str
    expires_at: float | None = None
    revoked_at: float | None = None
    scopes: frozenset[str] = frozenset({JOIN_SCOPE})


class JoinTokens:
    """`secret` is the job's own; `default` is the join token that the manager made itself, "" for none."""

    def __init__(self, secret: str, default: str = "") -> None:
        self._secret = digest_of(secret)
        self._default = digest_of(default) if default else ""
        self._tokens: dict[str, _Token] = {}
        self.update({})

    def update(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in the tokens that the journal has, by name: each has digest, expires_at and revoked_at."""
        own = {DEFAULT_TOKEN: _Token(DEFAULT_TOKEN, self._default)} if self._default else {}
        stored = {
            name: _Token(
                name,
                row["digest"],
                row["expires_at"],
                row["revoked_at"],
                frozenset(row.get("scopes", (JOIN_SCOPE,))),  # older rows have none, and were join tokens
            )
            for name, row in rows.items()
        }
        default = stored.get(DEFAULT_TOKEN)
        if default is not None and not default.digest:  # the manager's own, revoked
            stored[DEFAULT_TOKEN] = _Token(DEFAULT_TOKEN, self._default, revoked_at=default.revoked_at)
        self._tokens = {**own, **stored}

    def caller(self, authorization: str, at: float) -> Caller:
        """Who sent this header. `at` is in seconds since 1970. Raises Unauthorized with a sentence for people,
        UnknownToken where it is no token that is known."""
        digest = digest_of(authorization.removeprefix(SCHEME)) if authorization.startswith(SCHEME) else ""
        ours = hmac.compare_digest(digest, self._secret)
        found = None
        for token in self._tokens.values():
            if hmac.compare_digest(digest, token.digest) and digest:
                found = token
        if ours:
            return Caller()
        if found is None:
            raise UnknownToken(UNKNOWN)
        caller = Caller(found.name, found.digest, found.scopes)
        if why := self.why_not(caller, at):
            raise Unauthorized(why)
        return caller

    def why_not(self, caller: Caller, at: float) -> str:
        """Why the caller is admitted no longer; "" while it is."""
        if caller.is_ours:
            return ""
        token = self._tokens.get(caller.token)
        if token is None or token.digest != caller.digest or token.revoked_at is not None:
            return f"The token {caller.token!r} was revoked."
        if token.expires_at is not None and at >= token.expires_at:
            return f"The token {caller.token!r} has expired."
        return ""
