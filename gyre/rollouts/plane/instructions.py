"""What the machine has the shell do. Instructions are carried out in their order, after the event that they come of.

This module must not know how one is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from gyre.errors import GyreError
from gyre.rollouts.plane.door_ledger import DoorRequest
from gyre.rollouts.plane.peers import Peer
from gyre.rollouts.protocol.frames import Frame
from gyre.rollouts.token_log.write_buffer import WriteBatch


class Send(NamedTuple):
    """`if_read`: it is left out where the peer has not read what it was sent before."""

    peer: Peer
    frame: Frame
    if_read: bool = False


class Close(NamedTuple):
    """After what is queued for the peer."""

    peer: Peer


class Deliver(NamedTuple):
    """Groups are ready for the peer: `RoomFor` asks for each frame of them, for as long as the peer reads."""

    peer: Peer


class ReportEvent(NamedTuple):
    """For people and the journal."""

    kind: str
    fields: dict[str, Any]


class Commit(Enum):
    """There is something for the ledger, and how long it may wait."""

    SOON = auto()
    """For the interval of commits."""
    NOW = auto()
    """Somebody waits for it."""
    AT_ONCE = auto()
    """Somebody waits for it, and nothing can come that could go with it."""


class CommitWithin(NamedTuple):
    """There is something for the ledger that is written after so long at the latest."""

    seconds: float


class DispatchSoon(NamedTuple):
    """`DispatchDue` is due once for everything that this turn of the loop brings."""


class Write(NamedTuple):
    """Write the batch, and say `Committed` when it is in the ledger."""

    batch: WriteBatch


class Answer(NamedTuple):
    """More can be told of these requests, or nothing any more: whoever waits for one looks at it."""

    requests: Sequence[DoorRequest]


class WakeWaiters(NamedTuple):
    """Whoever waits for what has one of these names looks again."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event was refused, and changed nothing: whoever brought it about gets the error."""

    error: GyreError


Instruction = (
    Send
    | Close
    | Deliver
    | ReportEvent
    | Commit
    | CommitWithin
    | DispatchSoon
    | Write
    | Answer
    | WakeWaiters
    | Refuse
)

DISPATCH_SOON = DispatchSoon()
