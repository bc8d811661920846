"""Where a trainer's published policies lie and who may fetch them: an arena of its own, and a server of its chunks.

Invariants:
- *the trainer waits for nobody*: see `gyre.weights.publisher`;
- *taken over*: who is started again for the same job finds what was published before it.

This module must not know what is published, or who fetches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gyre.errors import Unreachable
from gyre.weights.arena import Arena
from gyre.weights.claims import Claim, default_root
from gyre.weights.publisher import Publisher
from gyre.weights.server import ChunkServer
from gyre.weights.wire import address_towards

HELD = 3
"""Versions: the newest, the one that is being written, and the one that a pinned evaluation may still need."""

ENDPOINT_WITHIN_S = 60.0
"""For the rollout manager to say where it is and what the token is. It starts beside the trainer."""


class WeightSource:
    """`endpoint()` gives the manager's (URL, token), or None while unknown; the server listens on this machine's
    address on the way to it. Raises Unreachable where it stays unknown."""

    def __init__(
        self, purpose: Path, endpoint: Callable[[], tuple[str, str] | None], *, root: Path | None = None
    ) -> None:
        url, token = _wait_for(endpoint)
        self._claim = Claim(root or default_root(), f"trainer of {purpose}")
        self.arena = Arena(self._claim.path, held=HELD)
        self.server = ChunkServer(self.arena, token, host=address_towards(url))
        self.publisher = Publisher(self.arena, self.server)

    @property
    def address(self) -> str:
        return self.server.address

    def path(self, version: int) -> Path:
        return self.arena.versions[version].path

    def close(self) -> None:
        self.server.close()
        self.arena.close(remove=False)
        self._claim.close()


def _wait_for(endpoint: Callable[[], tuple[str, str] | None]) -> tuple[str, str]:
    until = time.monotonic() + ENDPOINT_WITHIN_S
    while (found := endpoint()) is None:
        if time.monotonic() > until:
            raise Unreachable(
                f"the rollout manager has not said within {ENDPOINT_WITHIN_S:g} s where it is.",
                hint="Look at its log: it writes rollouts.json into the job's directory when it listens.",
            )
        time.sleep(0.05)
    return found
