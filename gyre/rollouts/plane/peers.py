"""Who dials the rollout manager, as the machine sees them: what they may do, and that they are there.

This module must not know about sockets or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gyre.config import JOIN_SCOPE
from gyre.errors import Unauthorized


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials. `token` is the name of the join token, "" for the job's own processes."""

    token: str = ""
    digest: str = ""
    scopes: frozenset[str] = frozenset({JOIN_SCOPE})

    @property
    def is_ours(self) -> bool:
        return not self.token

    def check(self, scope: str, what: str) -> None:
        """Raises Unauthorized where its token has not this scope. The job's own processes may do everything."""
        if not self.is_ours and scope not in self.scopes:
            raise Unauthorized(f"The token {self.token!r} may not {what}: it has not the scope {scope}.")


class Peer(Protocol):
    """The other end of a connection, which the machine names in its instructions."""

    name: str
    """For people; the machine gives an instance's when it has joined."""
    closing: bool
    """Nothing more is sent to it, or taken from it. The machine sets it with the instruction to close, and the shell
    where the peer does not read."""

    @property
    def host(self) -> str:
        """The address that it dialled from; "" where that is not known."""
        ...
