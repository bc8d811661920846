"""The state of the rollout plane: what all subjects read, and each changes its own part of.

    groups      open groups, the tokens and leases of their samples      groups, sample_store, leases, quarantine
    links       the instances that have joined, and who is admitted      links, admission, spares
    versions    the policies that are published                          versions, updates
    placing     what goes to whom                                        placement
    windows     when the trainer's devices generate                      windows
    life        how instances behave                                     instances, joining, leaving
    requesters  who asks for samples                                     requesters, trainer, keys
    folded      events that one source brings about, so that nobody      peer_events
                fills the journal

A subject says what is to be done by adding to `instructions`. It imports only subjects below it: machine, ledger,
trainer and keys, instances, windows, joining, leaving, requesters, updates, placement, in this order.

This module reads no clock: `now` is the time of the event that is handled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre.rollouts.plane.autoscaler import Autoscaler
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.instances import Life
from gyre.rollouts.plane.instructions import Close, Commit, Instruction, ReportEvent, Send
from gyre.rollouts.plane.links import AgentLinks
from gyre.rollouts.plane.peer_events import PeerEvents
from gyre.rollouts.plane.peers import Peer
from gyre.rollouts.plane.placement import Placing, dispatch_soon
from gyre.rollouts.plane.report_queue import ReportQueue
from gyre.rollouts.plane.requesters import Requester
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.updates import Service
from gyre.rollouts.plane.versions import PolicyVersions
from gyre.rollouts.plane.windows import TRAINER_AWAY_S, Windows
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Frame, Reject
from gyre.rollouts.protocol.progress import Report


class Plane:
    """The plane of the manager of term `epoch`, which begins at `now`. `requesters` are the kinds that ask it for
    samples; where two own the same request, the first has it. `node` is this machine's name."""

    def __init__(
        self,
        settings: ManagerSettings,
        requesters: Sequence[type[Requester]],
        *,
        epoch: int,
        now: float,
        weights_key: str = "",
        node: str = "",
    ) -> None:
        self.settings = settings
        self.epoch = epoch
        self.weights_key = weights_key
        self.node = node
        self.now = now
        self.refused = 0
        """Requests and frames that were refused."""
        self.instructions: list[Instruction] = []
        """Of the event that is handled."""
        self.groups = OpenGroups(
            epoch=epoch,
            vocabulary=settings.vocabulary,
            most_resets=min(kind.most_resets for kind in requesters),
            words=settings.renderer,
        )
        self.links = AgentLinks(self.groups, settings.wanted)
        self.versions = PolicyVersions()
        self.reports = ReportQueue(self.groups)
        self.folded = PeerEvents(self.links)
        self.placing = Placing()
        self.service = Service()
        self.life = Life(looked_at=now)
        self.windows = Windows(now, grace_s=settings.restart_grace_s + TRAINER_AWAY_S)
        self.autoscaler = Autoscaler(settings.pools, of_fleet=not any(kind.trains for kind in requesters))
        self.requesters = [kind(self.groups, settings) for kind in requesters]
        self.own_handlers = {
            kind: handler for one in self.requesters for kind, handler in one.handlers().items()
        }
        """Of the events of requesters."""

    # -- what is to be done -------------------------------------------------------------------------

    def send(self, peer: Peer, frame: Frame, *, if_read: bool = False) -> None:
        if not peer.closing:
            self.instructions.append(Send(peer, frame, if_read))

    def close(self, peer: Peer) -> None:
        """End the connection, after what was sent."""
        if not peer.closing:
            peer.closing = True
            self.instructions.append(Close(peer))

    def commit(self, urgency: Commit) -> None:
        self.instructions.append(urgency)

    def report_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Report an event, or count it where its source brings about too many."""
        self.report_counted()
        if (event := self.folded.add(kind, fields, self.now)) is not None:
            self.instructions.append(ReportEvent(*event))

    def report_counted(self) -> None:
        """Report what was counted for long enough."""
        self.instructions += [ReportEvent(*event) for event in self.folded.due(self.now)]

    def reject(self, peer: Peer, error: FrameError) -> None:
        """Tell the peer the reason, and people once; no other peer notices. Its connection is to end."""
        self.refused += 1
        reason = str(error.details.get("reason", "malformed"))
        message = str(error)[:2000]
        self.report_event("PeerRefused", {"peer": peer.name, "reason": reason, "message": message})
        self.send(peer, Reject(code=reason, message=message))

    # -- reports that wait --------------------------------------------------------------------------

    def add_report(self, name: str, report: Report) -> None:
        """Collect a report that has samples and ends none, of an instance of which no report waits."""
        self.reports.add(name, report)
        self._cut_refused()

    def take_in(self, name: str | None = None) -> None:
        """Take in the reports that wait, or that of one instance: before anybody reads how far samples got."""
        if name is None:
            self.reports.take_in()
        else:
            self.reports.take_in_of(name)
        if (
            self.groups.cancelled
        ):  # a text ended some of their samples, whose engines are stopped when work is given
            self.commit(Commit.NOW)
            dispatch_soon(self)
        self._cut_refused()

    def _cut_refused(self) -> None:
        """Cut the instances that reported what cannot be, which shows when the report is taken in."""
        while self.reports.refused:
            name, error = self.reports.refused.pop(0)
            peer = self.links[name].connection
            if peer is not None:
                self.reject(peer, error)
                self.close(peer)
