"""What happens to the plane: the events that the machine takes. Those of one kind of requester stand with it.

This module must not know what follows from an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peers import Caller, Peer
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Frame, Publish
from gyre.rollouts.protocol.progress import Report
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import RolloutRows


class Restored(NamedTuple):
    """The first event: what the ledger has."""

    rows: RolloutRows


class AgentDialled(NamedTuple):
    """With its first frame. The link is there after it, unless it is refused."""

    peer: Peer
    frame: Frame | Report
    caller: Caller


class AgentSent(NamedTuple):
    link: AgentLink
    frame: Frame | Report


class AgentGone(NamedTuple):
    """Its connection ended."""

    link: AgentLink


class PeerRefused(NamedTuple):
    """It sent what cannot be: it is told why, and its connection is to end."""

    peer: Peer
    error: FrameError


class AgentUnadmitted(NamedTuple):
    """Its token is good no longer; `message` says why."""

    link: AgentLink
    message: str


class AgentDrainRequested(NamedTuple):
    """Of an instance that has a link."""

    link: AgentLink
    deadline_s: float
    reason: str


class Published(NamedTuple):
    """A policy version; `model` is the fingerprint of its shape, "" where that is not known."""

    frame: Publish
    model: str


class RoomFor(NamedTuple):
    """The peer has read what it was sent: the next frame of groups that are ready may go to it."""

    peer: Peer


class RolesWanted(NamedTuple):
    """How many instances of each role there are to be."""

    wanted: Mapping[str, int]


class ReportsDue(NamedTuple):
    """Somebody looks at the plane: reports that wait are taken in."""


class DispatchDue(NamedTuple):
    """All that this turn of the loop brought is taken."""


class LedgerFree(NamedTuple):
    """The ledger takes a batch."""


class Committed(NamedTuple):
    """The batch is in the ledger."""

    batch: WriteBatch


class Ticked(NamedTuple):
    """Time has passed. `cores_busy` is the share of this machine's cores in use, None where nobody wants to know."""

    cores_busy: float | None = None
