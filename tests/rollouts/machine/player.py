"""A rollout manager without sockets, store or clock: events in, and what is done of each, as plain data.

An event is a list: its kind, then its arguments; frames are in base64. What is done is a list of such lists, in order:
frames sent to a connection, connections that end, events told, commits asked for, what is written.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from gyre.config import JOIN_SCOPE
from gyre.rollouts.core.door_ledger import Asked, DoorRefused, Wish
from gyre.rollouts.manager import rollout_manager
from gyre.rollouts.manager.door.door import WRITTEN_WITHIN_S
from gyre.rollouts.manager.join_tokens import Caller
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.settings import DoorSettings, ManagerSettings
from gyre.rollouts.protocol.codec import encode, unpack
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Frame
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

    transport = None
    waiting_bytes = 0

    def __init__(self, player: Player, number: int, name: str, host: str) -> None:
        self.player, self.number, self.name, self.host = player, number, name, host
        self.closing = False

    def send(self, frame: Frame) -> None:
        if not self.closing:
            self.player.done.append(["send", self.number, packed(encode(frame))])

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.player.done.append(["close", self.number])


class Commits:
    """In the place of `GroupCommit`: commits come when the history has them."""

    told: Callable[[str], None] = staticmethod(lambda how: None)

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def soon(self) -> None:
        self.told("soon")

    def now(self) -> None:
        self.told("now")

    def at_once(self) -> None:
        self.told("at_once")

    def within(self, seconds: float) -> None:
        self.told(f"within {seconds}")


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
        self.sessions: dict[int, Any] = {}
        self.batch: WriteBatch | None = None
        real, rollout_manager.GroupCommit = rollout_manager.GroupCommit, Commits  # type: ignore[misc,assignment]
        try:
            self.manager = RolloutManager(
                rows,  # type: ignore[arg-type]
                term=term,
                token="secret",
                settings=settings_of(kind),
                on_event=lambda event, fields: self.done.append(["event", event, _plain(fields)]),
                monotonic=lambda: self.now,
                clock=lambda: self.now,
            )
        finally:
            rollout_manager.GroupCommit = real  # type: ignore[misc]
        self.manager._commits.told = lambda how: self.done.append(["commit", how])  # type: ignore[attr-defined]
        self.manager._restore(rows.load())
        self.restored, self.done = self.done, []

    async def play(self, event: Step, now: float) -> list[Step]:
        """What is done of the event, and of what it makes due in this turn of the loop."""
        self.now, self.done = now, []
        kind, *arguments = event
        await getattr(self, kind)(*arguments)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.done

    def connection(self, number: int, name: str, host: str) -> FakeConnection:
        connection = self.connections[number] = FakeConnection(self, number, name, host)
        return connection

    # -- agents -------------------------------------------------------------------------------------

    async def dial(self, number: int, host: str, joined: bool, frame: str) -> None:
        connection = self.connection(number, "an agent", host)
        caller = SPOT if joined else Caller()
        try:
            first = unpack(unpacked(frame))
            self.sessions[number] = self.manager.instances.join(first, connection, caller)  # type: ignore[arg-type]
        except FrameError as error:
            self._reject(number, error)

    async def said(self, number: int, frame: str) -> None:
        session, connection = self.sessions[number], self.connections[number]
        if session.connection is not connection or connection.closing:
            return
        try:
            self.manager.instances.received(session, unpack(unpacked(frame)))
        except FrameError as error:
            self._reject(number, error)
            await self.left(number)

    def _reject(self, number: int, error: FrameError) -> None:
        self.manager._reject(self.connections[number], error)  # type: ignore[arg-type]
        self.connections[number].close()

    async def left(self, number: int) -> None:
        session = self.sessions.pop(number, None)
        if session is not None and session.connection is self.connections[number]:
            self.manager.instances.disconnected(session)
        self.connections[number].close()

    async def drain(self, name: str, deadline_s: float, reason: str) -> None:
        self.done.append(["found", self.manager.instances.drain(name, deadline_s, reason)])

    async def revoke(self, token: str) -> None:
        self.manager.instances.cut_unadmitted(lambda caller: "revoked" if caller.token == token else "")

    # -- requesters ---------------------------------------------------------------------------------

    async def attach(self, number: int, frame: str) -> None:
        connection = self.connection(number, "the trainer", "")
        try:
            self.manager.trainer.attach(unpack(unpacked(frame)), connection)  # type: ignore[arg-type]
        except FrameError as error:
            self._reject(number, error)

    async def trainer(self, number: int, frame: str) -> None:
        connection = self.connections[number]
        if self.manager.trainer.connection is not connection:
            return
        try:
            await self.manager.trainer.received(connection, unpack(unpacked(frame)))  # type: ignore[arg-type]
        except FrameError as error:
            self._reject(number, error)
            await self.trainer_left(number)

    async def trainer_left(self, number: int) -> None:
        self.manager.trainer.left(self.connections[number])  # type: ignore[arg-type]
        self.connections[number].close()

    async def ask(self, owner: str, request_id: str, prompt: list[int], n: int, most: int, wish: Step) -> None:
        door = self.manager.door
        assert door is not None
        asked = Asked(
            request_id, np.array(prompt, np.int32), n, {"max_new_tokens": most}, Wish(*wish), stops=(3,)
        )
        try:
            _, is_new = door.ledger.ask(owner, asked, newest=self.manager.weights.newest, now=self.now)
        except DoorRefused as error:
            self.done.append(["refused", str(error)])
            return
        if is_new:
            door._commits.within(WRITTEN_WITHIN_S)
            door._dispatch.soon()

    async def delete(self, owner: str, request_id: str) -> None:
        door = self.manager.door
        assert door is not None
        try:
            known = door.ledger.find(owner, request_id)
        except DoorRefused as error:
            self.done.append(["refused", str(error)])
            return
        door.ledger.close([known])
        door._closed([known])

    async def abort(self, owner: str, request_id: str | None) -> None:
        door = self.manager.door
        assert door is not None
        some = door.ledger.abort(owner, request_id)
        if some:
            door._closed(some)
        self.done.append(["aborted", [known.id for known in some]])

    async def publish(self, frame: str) -> None:
        told = unpack(unpacked(frame))
        try:
            self.manager.trainer.publish(told, told.model)  # type: ignore[union-attr,arg-type]
        except FrameError as error:
            self.done.append(["refused", str(error)])

    async def looked_at(self, wanted: dict[str, int]) -> None:
        self.done.append(["looked", self.manager.looked_at(wanted)])

    # -- time and the ledger ------------------------------------------------------------------------

    async def tick(self) -> None:
        manager, now = self.manager, self.now
        manager._reports.take_in()
        manager._tell_counted(now)
        manager.instances.look(now)
        manager.policies.tell_service()
        settings = manager.settings
        manager.dispatch.look(
            now,
            rebalance_every_s=settings.rebalance_every_s,
            recall_timeout_s=settings.recall_timeout_s,
        )
        manager.windows.look(now)
        if manager.door is not None:
            manager.door.look(now)
        manager._advise(now)

    async def collect(self) -> None:
        self.batch = self.manager._batch()
        batch = self.batch
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
                sorted(batch.sessions.items()),
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
        self.manager._committed(batch)
        if self.kind == "door":
            self.done.append(["told", self._told()])

    def _told(self) -> list[Step]:
        """What clients of the door may be told."""
        door = self.manager.door
        assert door is not None
        return [
            [known.id, known.owner, known.failed, known.is_over, [list(one[:2]) for one in known.told]]
            for known in door.ledger.requests().values()
        ]

    async def status(self) -> None:
        self.done.append(["status", _plain(self.manager.status())])


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
