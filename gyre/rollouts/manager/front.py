"""A front of the rollout manager: the routes by which one kind of requester comes in, and what goes back to it.

Each kind of requester (`gyre.rollouts.plane.requesters`) has one, and `fronts_of` names those of a job. What they share
(the port, who may dial it at all, the ledger, instances) is the manager's: it asks for a good token before each route
that is not one of `open_paths`. Which tokens may do what, a route says itself.

This module must not know what is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

from gyre.ports.bounds import PortBounds
from gyre.rollouts.manager.callers import Callers
from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.plane.door_ledger import DoorRequest
from gyre.rollouts.plane.requesters import Requester
from gyre.rollouts.plane.settings import ManagerSettings

if TYPE_CHECKING:
    from gyre.rollouts.manager.shell import PlaneShell


class Front:
    """`shell` has the machine, `callers` says who may dial. What a front does not need it leaves as it is here."""

    requester: ClassVar[type[Requester]]
    bounds: ClassVar[PortBounds] = PortBounds()
    """Of the port, where nobody says otherwise."""
    open_paths: ClassVar[frozenset[str]] = frozenset()
    """Paths that need no token."""
    body_bytes: ClassVar[Mapping[str, int]] = {}
    """Largest bodies, by path; others are as large as the port takes."""

    def __init__(self, shell: PlaneShell, callers: Callers, *, weights_key: str) -> None:
        self.shell = shell
        self.plane = shell.plane
        self.callers = callers

    @classmethod
    def urgent_commit_s(cls, settings: ManagerSettings) -> float:
        """How long a commit that somebody waits for may wait for others."""
        return settings.urgent_commit_s

    def routes(self) -> list[web.RouteDef]:
        return []

    def status(self) -> dict[str, Any]:
        """What it adds to the plane's status."""
        return {}

    def connections(self) -> list[Connection]:
        """Those that stay open; they are closed when the manager stops."""
        return []

    def restored(self) -> None:
        """The machine has what the ledger has."""

    async def opened(self, host: str, port: int) -> None:
        """The manager listens there."""

    async def publish_first(self, folder: Path) -> None:
        """Where nobody trains: publish the folder as version 0, unless something was published. Raises GyreError."""

    def close(self) -> None:
        """The manager stops: nobody waits here any longer. Harmless when it is said again."""

    def collected(self) -> None:
        """A batch goes to the ledger: it has all that was done until now."""

    def committed(self) -> None:
        """That batch is in the ledger."""

    def wake(self, names: Sequence[str]) -> None:
        """Whoever waits for what has one of these names looks again."""

    def answer(self, requests: Sequence[DoorRequest]) -> None:
        """More can be told of these requests, or nothing any more."""
