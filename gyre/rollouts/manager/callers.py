"""Who dials the rollout manager: its tokens, as the journal has them now.

This module must not know about frames, or what callers want.
"""

from __future__ import annotations

from aiohttp import web

from gyre.clock import Clock
from gyre.errors import Unauthorized
from gyre.ports.http_gate import Credentials
from gyre.rollouts.manager.join_tokens import SCHEME, JoinTokens, UnknownToken
from gyre.rollouts.manager.token_reader import TokenReader
from gyre.rollouts.plane.peers import Caller
from gyre.store import RolloutStore


class Callers:
    """`token` is the job's own secret, `join_token` the default one of machines that join."""

    def __init__(self, store: RolloutStore, token: str, join_token: str, clock: Clock) -> None:
        self.tokens = JoinTokens(token, join_token)
        self._clock = clock
        self._reader = TokenReader(store, self.tokens, clock)

    def clock(self) -> float:
        """Now, in seconds since 1970."""
        return self._clock.time()

    def load(self) -> None:
        """Read the tokens; runs on the ledger's thread."""
        self._reader.load()

    async def read(self) -> None:
        """Read the tokens anew, beside the loop."""
        await self._reader.read()

    def close(self) -> None:
        self._reader.close()

    def known(self, request: web.Request) -> Caller:
        """By `Authorization: Bearer`, or by `x-api-key`, as older clients of Anthropic's have it. Raises
        Unauthorized."""
        shown = request.headers.get("Authorization") or SCHEME + request.headers.get("x-api-key", "")
        return self.tokens.caller(shown, self.clock())

    async def admitted(self, request: web.Request) -> Caller:
        """The same, after a look at the store where the token is not known: it may be a moment old."""
        try:
            return self.known(request)
        except UnknownToken:
            await self._reader.anew()
            return self.known(request)

    def is_proven(self, shown: Credentials) -> bool:
        """Whether a token is shown that is good now."""
        try:
            self.tokens.caller(shown.authorization.decode("utf-8", "surrogateescape"), self.clock())
        except Unauthorized:
            return False
        return True

    def only_ours(self, request: web.Request, what: str) -> None:
        """Raises Unauthorized for anybody but the job's own processes."""
        caller = self.known(request)
        if not caller.is_ours:
            raise Unauthorized(f"The token {caller.token!r} is an instance's: it may not {what}.")

    def why_not(self, caller: Caller) -> str:
        """Why the caller is admitted no longer; "" while it is."""
        return self.tokens.why_not(caller, self.clock())
