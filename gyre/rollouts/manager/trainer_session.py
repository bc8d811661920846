"""The trainer as the rollout manager sees it: one connection at a time, and what its frames bring about.

Invariants:
- *the newest term wins*: a trainer whose term is older than one that has attached is refused;
- *told to whoever is there*: groups that cannot be generated are told to each trainer that attaches, once.

This module must not know about sockets or how a trainer trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gyre.rollouts.core.groups import OpenGroups
from gyre.rollouts.core.requests import InFlightSample
from gyre.rollouts.manager.autoscaler import Autoscaler
from gyre.rollouts.manager.delivery import Delivery
from gyre.rollouts.manager.device_sharing import DeviceSharing
from gyre.rollouts.manager.dispatch import Dispatch
from gyre.rollouts.manager.policy_push import PolicyPush
from gyre.rollouts.manager.policy_versions import PolicyVersions
from gyre.rollouts.manager.report_queue import ReportQueue
from gyre.rollouts.manager.sessions import Connection
from gyre.rollouts.protocol.fields import FrameError, refuse
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Attach,
    Failed,
    Frame,
    GroupsStored,
    LendDevices,
    LoadFailed,
    Publish,
    ReclaimDevices,
    Request,
    SampleCounts,
    TrainerStatus,
)
from gyre.rollouts.protocol.progress import Report
from gyre.rollouts.samples import unpack_groups
from gyre.rollouts.token_log.group_commit import GroupCommit
from gyre.rollouts.token_log.write_buffer import WriteBatch

MESSAGE_CHARS = 60_000
"""Of one failure's message; a frame takes little more."""


class TrainerSession:
    """`windows()` has the windows of the trainer's devices, `underway()` says what becomes of samples; `autoscaler` is
    None where people decide how many instances there are."""

    def __init__(
        self,
        groups: OpenGroups,
        versions: PolicyVersions,
        delivery: Delivery,
        dispatch: Dispatch,
        policies: PolicyPush,
        reports: ReportQueue,
        commits: GroupCommit[WriteBatch],
        autoscaler: Autoscaler | None,
        *,
        windows: Callable[[], DeviceSharing],
        underway: Callable[[], SampleCounts],
        on_event: Callable[[str, dict[str, Any]], None],
        now: Callable[[], float],
        has_door: bool = False,
    ) -> None:
        """`has_door`: nobody attaches, and requests come from the door."""
        self.connection: Connection | None = None
        self.term = -1
        """Of the newest that has attached."""
        self._groups = groups
        self._versions = versions
        self._delivery = delivery
        self._dispatch = dispatch
        self._policies = policies
        self._reports = reports
        self._commits = commits
        self._autoscaler = autoscaler
        self._windows = windows
        self._underway = underway
        self._on_event = on_event
        self._now = now
        self._has_door = has_door
        self._failures_told: set[int] = set()

    def attach(self, first: Frame | Report, connection: Connection) -> None:
        """Raises FrameError where it is not a trainer's first frame, or an older trainer's."""
        if not isinstance(first, Attach) or first.protocol != PROTOCOL:
            raise refuse("no_hello", "the first frame is no Attach of this protocol")
        if first.term < self.term:
            raise refuse("fenced", f"a trainer of term {self.term} has attached; this one is {first.term}")
        if self.connection is not None:
            self.connection.close()
        self._windows().trainer_attached(self._now(), other=first.term != self.term)
        self.connection, self.term = connection, first.term
        self._delivery.attached(connection, samples_ahead=first.samples_ahead)
        self._failures_told = set()

    def left(self, connection: Connection) -> None:
        """The connection ended; nothing happens where another trainer has attached."""
        if self.connection is not connection:
            return
        self.connection = None
        self._windows().trainer_left(self._now())
        self._delivery.attached(None)
        if self._autoscaler is not None:
            self._autoscaler.detached()

    def answer(self, frame: Frame) -> None:
        """Send it to the trainer that is attached, if any."""
        if self.connection is not None:
            self.connection.send(frame)

    async def received(self, connection: Connection, frame: Frame | Report) -> None:
        """Raises FrameError for what a trainer does not send, or what cannot be."""
        model = ""
        if isinstance(frame, Publish) and frame.version > self._versions.newest:
            model = await asyncio.to_thread(self._versions.model_of, frame)
            if self.connection is not connection:
                return  # another trainer attached meanwhile
        if not isinstance(frame, Request | TrainerStatus):
            self._reports.take_in()
        if isinstance(frame, Request):
            try:
                opened = self._groups.open(frame)
            except FrameError as error:
                if error.details["reason"] != "pinned_late":
                    raise
                ids = [group.id for group in unpack_groups(frame.groups)]
                connection.send(Failed(purpose=frame.purpose, ids=ids, message=str(error)))
                return
            if opened:
                self._commits.soon()
                self._dispatch.soon()
            if self._delivery.holds(frame.purpose):
                self._delivery.again(frame.purpose, [group.id for group in unpack_groups(frame.groups)])
            self.tell_failures()
        elif isinstance(frame, GroupsStored):
            self._groups.cancelled += self._groups.close(frame.purpose, frame.ids)
            self._dispatch.cancel_superseded()
            self._delivery.taken(frame.purpose, frame.ids)
            self._commits.soon()
            self._policies.promote()
        elif isinstance(frame, Publish):
            self.publish(frame, model)
        elif isinstance(frame, LendDevices):
            self._windows().lend(frame, self._now())
        elif isinstance(frame, ReclaimDevices):
            self._windows().reclaim(frame.window, self._now())
        elif isinstance(frame, TrainerStatus):
            connection.send(self._underway())
            self._dispatch.wants(frame.wanted)
            if self._autoscaler is not None:
                self._autoscaler.pulse(frame, self._now())
        else:
            raise refuse("unexpected", f"a trainer does not send {type(frame).__name__}")

    def publish(self, frame: Publish, model: str) -> None:
        """Take a published version. Raises FrameError if it was published with other bytes before."""
        known = self._versions.served
        if self._versions.publish(frame, model):
            self._groups.newest_version = self._versions.newest
            self._commits.at_once()  # once a step, and every instance waits for it
            if self._autoscaler is not None and not self._has_door:  # others' steps say nothing of this fleet
                self._autoscaler.step_done(self._now())
        if self._versions.served is not known:
            self._policies.sources_moved()

    def tell_failures(self) -> None:
        """Tell the trainer of quarantined samples and of groups that are given up."""
        quarantined, self._groups.quarantined = self._groups.quarantined, []
        for state in quarantined:
            self._on_event("SampleQuarantined", {**_description(state), "evidence": list(state.evidence)})
        for state in list(self._groups.given_up.values()):
            request = state.request
            if self.connection is None or request.number in self._failures_told:
                continue
            self._failures_told.add(request.number)
            said = "; ".join(state.evidence) or "see the events of its instances"
            message = f"Group {request.group.id} cannot be generated; sample {state.index} failed: {said}"
            self.connection.send(
                Failed(purpose=request.purpose, ids=[request.group.id], message=message[:MESSAGE_CHARS])
            )

    def give_up_pinned(self, frame: LoadFailed) -> None:
        """An instance cannot load a version that only pinned requests keep served, and no other instance has it: its
        publisher and everybody who had it have died. The requests fail, or nobody would ever generate again."""
        served = self._versions.served
        if served is None or served.version != frame.version:
            return
        if any(instance.version == served.version for instance in self._groups.instances.values()):
            return
        message = f"Version {served.version} is to be had nowhere any more: {frame.error}"
        if served.version < self._versions.durable:
            for request in self._groups.pinned_to(served.version):
                ids = [request.group.id]
                if self._has_door:
                    self._groups.give_up(request, message[:2000])
                self.answer(Failed(purpose=request.purpose, ids=ids, message=message[:MESSAGE_CHARS]))
            self._dispatch.cancel_superseded()
            self._commits.soon()


def _description(state: InFlightSample) -> dict[str, Any]:
    return {
        "group": state.request.group.id,
        "purpose": state.request.purpose,
        "index": state.index,
        "prompt": state.request.group.prompt_ids[:256].tolist(),
    }
