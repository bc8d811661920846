"""A rollout manager without sockets, store or clock: events in, and what is done of each, as plain data.

An event is a list: its kind, then its arguments; frames are in base64. What is done is a list of such lists, in order:
frames sent to a connection, connections that end, events told, commits asked for, what is written.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np

from gyre.config import JOIN_SCOPE
from gyre.request_body import RequestRefused
from gyre.rollouts.plane.door_ledger import Asked, Wish
from gyre.rollouts.plane.events import (
    AgentDialled,
    AgentDrainRequested,
    AgentGone,
    AgentSent,
    AgentUnadmitted,
    Committed,
    DispatchDue,
    LedgerFree,
    PeerRefused,
    Published,
    ReportsDue,
    Restored,
    RolesWanted,
    RoomFor,
    Ticked,
)
from gyre.rollouts.plane.instructions import (
    Answer,
    Close,
    Commit,
    CommitWithin,
    Deliver,
    DispatchSoon,
    Instruction,
    Refuse,
    ReportEvent,
    Send,
    Write,
)
from gyre.rollouts.plane.keys import KeysRequester, RequestDeleted, RequestsAborted, SamplesAsked
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.machine import handle
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.requesters import Requester
from gyre.rollouts.plane.settings import DoorSettings, ManagerSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.plane.status import plane_status
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerGone, TrainerRequester, TrainerSent
from gyre.rollouts.protocol.codec import encode, unpack
from gyre.rollouts.protocol.credentials import weights_key
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Frame, Hello, Publish
from gyre.rollouts.scheduling.elasticity import ElasticSettings
from gyre.rollouts.scheduling.pools import Pool
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import RolloutRows
from gyre.store.tables import encode_body

Step = list[Any]
SPOT = Caller("spot", "d1", frozenset({JOIN_SCOPE}))


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unpacked(text: str) -> bytes:
    return base64.b64decode(text)


class Rows:
    """The ledger of one manager after another."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        self.groups: dict[int, bytes] = {}
        self.deltas: dict[int, bytes] = {}

    def commit(self, batch: WriteBatch) -> None:
        self.counters = msgspec.json.decode(encode_body(dict(batch.counters), "the counters"))
        self.groups |= batch.opened
        self.deltas |= dict(batch.encoded())
        for key in batch.closed:
            self.groups.pop(key, None)
        for key in batch.forgotten:
            self.deltas.pop(key, None)

    def load(self) -> RolloutRows:
        return RolloutRows(1, self.counters, dict(sorted(self.groups.items())), sorted(self.deltas.items()))


class FakeConnection:
    """A peer that reads at once."""

    waiting_bytes = 0

    def __init__(self, player: Player, number: int, name: str, host: str) -> None:
        self.player, self.number, self.name, self.host = player, number, name, host
        self.closing = False

    def send(self, frame: Frame) -> None:
        self.player.done.append(["send", self.number, packed(encode(frame))])

    def close(self) -> None:
        self.closing = True
        self.player.done.append(["close", self.number])


def settings_of(kind: str) -> ManagerSettings:
    if kind == "door":
        door = DoorSettings(most_open=6, keep_s=20.0, keep_tokens=200, answer_within_s=15.0)
        return ManagerSettings(door=door, restart_grace_s=0.5, load_timeout_s=30.0, stall_timeout_s=4.0)
    pools = {"rollout": Pool(ElasticSettings(min=0, max=4))}
    return ManagerSettings(
        pools=pools,
        wanted={"rollout": 2, "spare_rollout": 1},
        restart_grace_s=0.5,
        load_timeout_s=30.0,
        stall_timeout_s=4.0,
        update_mode="handover" if kind == "handover" else "in_place",
    )


class Player:
    """One manager of the job `kind` over `rows`, which began at `now`."""

    def __init__(self, kind: str, rows: Rows, term: int, now: float) -> None:
        self.done: list[Step] = []
        self.kind, self.rows, self.now = kind, rows, now
        self.connections: dict[int, FakeConnection] = {}
        self.links: dict[int, AgentLink] = {}
        self.batch: WriteBatch | None = None
        self.is_dispatch_due = False
        settings = settings_of(kind)
        requesters: list[type[Requester]] = [KeysRequester] if kind == "door" else [TrainerRequester]
        key = weights_key("secret")
        self.plane = Plane(settings, requesters, epoch=term, now=now, weights_key=key, node="here")
        self.happens(Restored(rows.load()))
        self.restored, self.done = self.done, []

    def happens(self, event: object) -> list[Instruction]:
        """Raises GyreError where the event is refused."""
        instructions = handle(self.plane, event, self.now)
        for one in instructions:
            self.carry_out(one)
        return instructions

    def carry_out(self, one: Instruction) -> None:
        if isinstance(one, Send):
            one.peer.send(one.frame)  # type: ignore[attr-defined]
        elif isinstance(one, Close):
            one.peer.close()  # type: ignore[attr-defined]
        elif isinstance(one, Deliver):
            while self.happens(RoomFor(one.peer)):
                pass
        elif isinstance(one, ReportEvent):
            self.done.append(["event", one.kind, _plain(one.fields)])
        elif isinstance(one, Commit):
            self.done.append(["commit", one.name.lower()])
        elif isinstance(one, CommitWithin):
            self.done.append(["commit", f"within {one.seconds}"])
        elif isinstance(one, DispatchSoon):
            self.is_dispatch_due = True
        elif isinstance(one, Refuse):
            raise one.error

    async def play(self, event: Step, now: float) -> list[Step]:
        """What is done of the event, and of what it makes due in this turn of the loop."""
        self.now, self.done = now, []
        kind, *arguments = event
        await getattr(self, kind)(*arguments)
        for _ in range(2):
            if self.is_dispatch_due:
                self.is_dispatch_due = False
                self.happens(DispatchDue())
        return self.done

    def connection(self, number: int, name: str, host: str) -> FakeConnection:
        connection = self.connections[number] = FakeConnection(self, number, name, host)
        return connection

    # -- agents -------------------------------------------------------------------------------------

    async def dial(self, number: int, host: str, joined: bool, frame: str) -> None:
        connection = self.connection(number, "an agent", host)
        caller = SPOT if joined else Caller()
        first = unpack(unpacked(frame))
        try:
            self.happens(AgentDialled(connection, first, caller))
            assert isinstance(first, Hello)
            self.links[number] = self.plane.links[first.instance]
        except FrameError as error:
            self._reject(number, error)

    async def said(self, number: int, frame: str) -> None:
        link, connection = self.links[number], self.connections[number]
        if link.connection is not connection or connection.closing:
            return
        try:
            self.happens(AgentSent(link, unpack(unpacked(frame))))
        except FrameError as error:
            self._reject(number, error)
            await self.left(number)

    def _reject(self, number: int, error: FrameError) -> None:
        self.happens(PeerRefused(self.connections[number], error))
        self._end(number)

    def _end(self, number: int) -> None:
        """The shell ends the connection, if the machine has not."""
        if not self.connections[number].closing:
            self.connections[number].close()

    async def left(self, number: int) -> None:
        link = self.links.pop(number, None)
        if link is not None and link.connection is self.connections[number]:
            self.happens(AgentGone(link))
        self._end(number)

    async def drain(self, name: str, deadline_s: float, reason: str) -> None:
        link = self.plane.links.get(name)
        if link is not None:
            self.happens(AgentDrainRequested(link, deadline_s, reason))
        self.done.append(["found", link is not None])

    async def revoke(self, token: str) -> None:
        for link in list(self.plane.links.values()):
            if link.caller.token == token:
                self.happens(AgentUnadmitted(link, "revoked"))

    # -- requesters ---------------------------------------------------------------------------------

    @property
    def asks(self) -> Any:
        """The one kind of requester that it has."""
        return self.plane.requesters[0]

    async def attach(self, number: int, frame: str) -> None:
        connection = self.connection(number, "the trainer", "")
        try:
            self.happens(TrainerDialled(connection, unpack(unpacked(frame))))
        except FrameError as error:
            self._reject(number, error)

    async def trainer(self, number: int, frame: str) -> None:
        connection = self.connections[number]
        if self.asks.peer is not connection:
            return
        told = unpack(unpacked(frame))
        is_newer = isinstance(told, Publish) and told.version > self.plane.versions.newest
        try:
            self.happens(TrainerSent(connection, told, told.model if is_newer else ""))  # type: ignore[union-attr]
        except FrameError as error:
            self._reject(number, error)
            await self.trainer_left(number)

    async def trainer_left(self, number: int) -> None:
        self.happens(TrainerGone(self.connections[number]))
        self._end(number)

    async def ask(
        self, owner: str, request_id: str, prompt: list[int], n: int, most: int, wish: Step
    ) -> None:
        tokens = np.array(prompt, np.int32)
        asked = Asked(request_id, tokens, n, {"max_new_tokens": most}, Wish(*wish), stops=(3,))
        self._by_door(SamplesAsked(owner, asked, self.now))

    async def delete(self, owner: str, request_id: str) -> None:
        self._by_door(RequestDeleted(owner, request_id))

    async def publish(self, frame: str) -> None:
        told = unpack(unpacked(frame))
        assert isinstance(told, Publish)
        self._by_door(Published(told, told.model))

    def _by_door(self, event: object) -> None:
        try:
            self.happens(event)
        except (RequestRefused, FrameError) as error:
            self.done.append(["refused", str(error)])

    async def abort(self, owner: str, request_id: str | None) -> None:
        done = self.happens(RequestsAborted(owner, request_id))
        some = [known.id for one in done if isinstance(one, Answer) for known in one.requests]
        self.done.append(["aborted", some])

    async def looked_at(self, wanted: dict[str, int]) -> None:
        self.happens(RolesWanted(wanted))
        serving = sum(one.admitted for one in self.plane.groups.instances.values())
        generated = self.plane.groups.account.generated
        looked = {"serving": serving, "open": self.asks.open_count, "generated": generated}
        self.done.append(["looked", looked])

    # -- time and the ledger ------------------------------------------------------------------------

    async def tick(self) -> None:
        self.happens(Ticked())

    async def collect(self) -> None:
        done = self.happens(LedgerFree())
        self.batch = batch = next((one.batch for one in done if isinstance(one, Write)), None)
        if batch is None:
            return
        self.done.append(
            [
                "write",
                _plain(batch.counters),
                sorted(batch.opened),
                [[seq, packed(body)] for seq, body in batch.encoded()],
                batch.closed,
                batch.forgotten,
                sorted(batch.reports.items()),
                sorted(batch.ended),
                batch.complete,
                batch.finished,
            ]
        )

    async def committed(self) -> None:
        batch, self.batch = self.batch, None
        if batch is None:
            return
        self.rows.commit(batch)
        self.happens(Committed(batch))
        if self.kind == "door":
            self.done.append(["told", self._told()])

    def _told(self) -> list[Step]:
        """What clients of the door may be told."""
        return [
            [known.id, known.owner, known.failed, known.is_over, [list(one[:2]) for one in known.told]]
            for known in self.asks.ledger.requests().values()
        ]

    async def status(self) -> None:
        self.happens(ReportsDue())
        self.done.append(["status", _plain(plane_status(self.plane))])


def _plain(fields: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(fields, default=str))


def in_order(done: list[Step]) -> dict[str, Any]:
    """What was done as far as its order matters: that of frames to one peer, and of events. Of commits the most
    urgent."""
    sent: dict[str, list[Step]] = {}
    commits = [step[1] for step in done if step[0] == "commit"]
    for step in done:
        if step[0] in ("send", "close"):
            sent.setdefault(f"to {step[1]}", []).append(step)
        elif step[0] != "commit":
            sent.setdefault("told", []).append(step)
    urgent = [how for how in ("at_once", "now", "soon") if how in commits][:1]
    return {**sent, "commit": urgent + sorted({how for how in commits if how.startswith("within")})}


__all__ = ["Player", "Rows", "Step", "in_order", "packed", "unpacked"]
