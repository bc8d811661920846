"""The trainer, a requester that dials: one connection at a time, and what its frames bring about.

Invariants:
- *the newest term wins*: a trainer whose term is older than one that has attached is refused;
- *told to whoever is there*: groups that cannot be generated are told to each trainer that attaches, once.

This module must not know about sockets or how a trainer trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gyre.rollouts.plane import placement, updates, windows
from gyre.rollouts.plane.delivery import Deliverable, Delivery
from gyre.rollouts.plane.events import RoomFor
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.instructions import Commit, Deliver, Send
from gyre.rollouts.plane.peers import Peer
from gyre.rollouts.plane.requesters import Handler, Requester, report_failures
from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.status import underway
from gyre.rollouts.protocol.fields import FrameError, refuse
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Attach,
    Attached,
    Failed,
    Frame,
    GroupsStored,
    LendDevices,
    Publish,
    ReclaimDevices,
    Request,
    SampleCounts,
    TrainerStatus,
)
from gyre.rollouts.protocol.progress import Report
from gyre.rollouts.samples import unpack_groups
from gyre.rollouts.token_log.write_buffer import WriteBatch

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

MESSAGE_CHARS = 60_000
"""Of one failure's message; a frame takes little more."""


class TrainerDialled(NamedTuple):
    """With its first frame."""

    peer: Peer
    frame: Frame | Report


class TrainerSent(NamedTuple):
    """`model` is the fingerprint of what a Publish brings, "" for other frames."""

    peer: Peer
    frame: Frame | Report
    model: str = ""


class TrainerGone(NamedTuple):
    """Its connection ended."""

    peer: Peer


class TrainerRequester(Requester):
    trains = True

    def __init__(self, groups: OpenGroups, settings: ManagerSettings) -> None:
        super().__init__(groups, settings)
        self.peer: Peer | None = None
        self.term = -1
        """Of the newest that has attached."""
        self.delivery = Delivery(groups.requests)
        self._failures_told: set[int] = set()

    def handlers(self) -> Mapping[type, Handler]:
        return {
            TrainerDialled: self._dialled,
            TrainerSent: self._sent,
            TrainerGone: self._gone,
            RoomFor: self._room_for,
        }

    def owns(self, request: InFlightRequest) -> bool:
        return True  # whatever purpose it has for itself

    # -- what comes of its requests -----------------------------------------------------------------

    def collect(self, plane: Plane, batch: WriteBatch, finished: Sequence[InFlightSample]) -> None:
        if self.peer is not None:
            for frame in self.delivery.finished(finished):
                plane.send(self.peer, frame, if_read=True)

    def committed(self, plane: Plane, batch: WriteBatch, complete: Sequence[InFlightRequest]) -> None:
        self.delivery.complete(complete)
        self._deliver(plane)

    def _deliver(self, plane: Plane) -> None:
        if self.peer is not None and self.delivery.is_due:
            plane.instructions.append(Deliver(self.peer))

    def _room_for(self, plane: Plane, event: RoomFor) -> None:
        if event.peer is self.peer and (frame := self.delivery.next_frame()) is not None:
            plane.instructions.append(Send(event.peer, frame))

    def given_up(self, plane: Plane, samples: Sequence[InFlightSample]) -> None:
        for state in samples:
            request = state.request
            if self.peer is None or request.number in self._failures_told:
                continue
            self._failures_told.add(request.number)
            said = "; ".join(state.evidence) or "see the events of its instances"
            message = f"Group {request.group.id} cannot be generated; sample {state.index} failed: {said}"
            self._fail(plane, request, message)

    def unservable(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        self._fail(plane, request, why)

    def _fail(self, plane: Plane, request: Deliverable, why: str) -> None:
        if self.peer is not None:
            failed = Failed(purpose=request.purpose, ids=[request.group.id], message=why[:MESSAGE_CHARS])
            plane.send(self.peer, failed)

    # -- its connection -----------------------------------------------------------------------------

    def _dialled(self, plane: Plane, event: TrainerDialled) -> None:
        """Raises FrameError where it is not a trainer's first frame, or an older trainer's."""
        first = event.frame
        if not isinstance(first, Attach) or first.protocol != PROTOCOL:
            raise refuse("no_hello", "the first frame is no Attach of this protocol")
        if first.term < self.term:
            raise refuse("fenced", f"a trainer of term {self.term} has attached; this one is {first.term}")
        if self.peer is not None:
            plane.close(self.peer)
        windows.trainer_attached(plane, event.peer, other=first.term != self.term)
        self.peer, self.term = event.peer, first.term
        self.delivery.attached(samples_ahead=first.samples_ahead)
        self._failures_told = set()
        plane.send(self.peer, Attached(protocol=PROTOCOL, epoch=plane.epoch, version=plane.versions.newest))

    def _gone(self, plane: Plane, event: TrainerGone) -> None:
        """Nothing happens where another trainer has attached."""
        if self.peer is event.peer:
            self.peer = None
            windows.trainer_left(plane)
            plane.autoscaler.detached()

    def _sent(self, plane: Plane, event: TrainerSent) -> None:
        """Raises FrameError for what a trainer does not send, or what cannot be."""
        peer, frame, model = event
        if self.peer is not peer:
            return  # another trainer attached meanwhile
        if not isinstance(frame, Request | TrainerStatus):
            plane.take_in()
        if isinstance(frame, Request):
            self._requested(plane, peer, frame)
        elif isinstance(frame, GroupsStored):
            self._stored(plane, frame)
        elif isinstance(frame, Publish):
            if updates.publish(plane, frame, model):
                plane.autoscaler.step_done(plane.now)
        elif isinstance(frame, LendDevices):
            windows.lend(plane, frame)
        elif isinstance(frame, ReclaimDevices):
            windows.reclaim(plane, frame.window)
        elif isinstance(frame, TrainerStatus):
            plane.send(peer, self._underway(plane))
            placement.set_wanted(plane, frame.wanted)
            plane.autoscaler.pulse(frame, plane.now)
        else:
            raise refuse("unexpected", f"a trainer does not send {type(frame).__name__}")

    def _requested(self, plane: Plane, peer: Peer, frame: Request) -> None:
        try:
            opened = self._open(plane, frame)
        except FrameError as error:
            if error.details["reason"] != "pinned_late":
                raise
            ids = [group.id for group in unpack_groups(frame.groups)]
            plane.send(peer, Failed(purpose=frame.purpose, ids=ids, message=str(error)))
            return
        if opened:
            plane.commit(Commit.SOON)
            placement.dispatch_soon(plane)
        if self.delivery.holds(frame.purpose):
            self.delivery.again(frame.purpose, [group.id for group in unpack_groups(frame.groups)])
            self._deliver(plane)
        report_failures(plane)

    def _open(self, plane: Plane, frame: Request) -> bool:
        """Open the groups of the frame; whether any is new. Raises FrameError."""
        return bool(plane.groups.open(frame))

    def _underway(self, plane: Plane) -> SampleCounts:
        return underway(plane.groups, plane.links.values(), plane.now)

    def _close(self, plane: Plane, frame: GroupsStored) -> None:
        plane.groups.cancelled += plane.groups.close(frame.purpose, frame.ids)

    def _stored(self, plane: Plane, frame: GroupsStored) -> None:
        self._close(plane, frame)
        placement.cancel_superseded(plane)
        self.delivery.taken(frame.purpose, frame.ids)
        plane.commit(Commit.SOON)
        updates.promote(plane)
