"""Another kind of requester is one class: the machine gives it what comes of its requests, and nobody else's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gyre.rollouts.plane import placement
from gyre.rollouts.plane.events import (
    AgentDialled,
    AgentSent,
    Committed,
    DispatchDue,
    LedgerFree,
    Published,
    RoomFor,
)
from gyre.rollouts.plane.instructions import Commit, DispatchSoon, Instruction, Send, Write
from gyre.rollouts.plane.machine import handle
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.requesters import Handler, Requester
from gyre.rollouts.plane.requests import InFlightRequest
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerRequester, TrainerSent
from gyre.rollouts.protocol.codec import encode, unpack
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Assign,
    Attach,
    Done,
    Hello,
    Loaded,
    Publish,
    Request,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.rollouts.token_log.write_buffer import WriteBatch


class TurnAsked(NamedTuple):
    number: int


class Turns(Requester):
    """Asks for one sample at a time, and hears of it when it is in the ledger."""

    most_resets = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answered: dict[int, list[int]] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {TurnAsked: self._asked}

    def owns(self, request: InFlightRequest) -> bool:
        return request.purpose == "turn"

    def _asked(self, plane: Plane, event: TurnAsked) -> None:
        plane.groups.open(asked("turn", event.number))
        plane.commit(Commit.SOON)
        placement.dispatch_soon(plane)

    def committed(self, plane: Plane, batch: WriteBatch, complete: Sequence[InFlightRequest]) -> None:
        for request in complete:
            self.answered[request.group.id] = request.samples[0].tokens()[0].tolist()
            plane.groups.close(request.purpose, [request.group.id])


class FakePeer:
    host = ""
    closing = False

    def __init__(self, name: str) -> None:
        self.name = name


def asked(purpose: str, number: int) -> Request:
    groups = pack_groups([Group(number, np.array([7, 8], np.int32))])
    sampling = {"max_new_tokens": 9}
    return Request(purpose=purpose, groups=groups, n=1, sampling=sampling, seed=1, min_version=0)


class World:
    """A plane with a trainer and sessions, and one instance that ends whatever it gets with two tokens."""

    def __init__(self) -> None:
        self.plane = Plane(ManagerSettings(), [Turns, TrainerRequester], epoch=1, now=1.0)
        self.trainer, self.agent = FakePeer("the trainer"), FakePeer("a")
        self.delivered: list[int] = []
        self.seq = 0
        self.happens(TrainerDialled(self.trainer, Attach(protocol=PROTOCOL, term=1)))
        self.happens(Published(Publish(version=0, checksum="c", path="", sources=["h:1"]), ""))
        hello = Hello(
            protocol=PROTOCOL,
            instance="a",
            incarnation="1",
            model="unset",
            engine="none",
            max_running=4,
            kv_tokens=1 << 12,
        )
        self.happens(AgentDialled(self.agent, hello, Caller()))
        self.commit()
        self.happens(
            AgentSent(self.plane.links["a"], Loaded(version=0, checksum="c", fetch_s=0.0, load_s=0.0))
        )

    def happens(self, event: object) -> list[Instruction]:
        done = handle(self.plane, event, 1.0)
        for one in done:
            if isinstance(one, Send) and isinstance(one.frame, Assign):
                self.generate(one.frame)
            elif isinstance(one, Send) and isinstance(one.frame, Done):
                self.delivered += [group.id for group in unpack_groups(one.frame.groups)]
            elif isinstance(one, DispatchSoon):
                self.happens(DispatchDue())
        return done

    def generate(self, frame: Assign) -> None:
        self.seq += 1
        rows, leases = [one.row for one in frame.work], [one.lease for one in frame.work]
        size = len(rows)
        report = GenerationProgress(
            self.seq,
            np.array(rows, np.uint32),
            np.array(leases, np.uint64),
            np.zeros(size, np.uint32),
            np.full(size, 2, np.uint32),
            np.zeros(size, np.int32),
            np.arange(2 * size, dtype=np.int32),
            np.zeros(2 * size, np.float32),
            [End(row, lease, "stop", "", ()) for row, lease in zip(rows, leases, strict=True)],
        )
        self.happens(AgentSent(self.plane.links["a"], unpack(encode(report))))

    def commit(self) -> None:
        for one in self.happens(LedgerFree()):
            if isinstance(one, Write):
                self.happens(Committed(one.batch))
                while self.happens(RoomFor(self.trainer)):
                    pass


def test_each_kind_gets_what_comes_of_its_own_requests() -> None:
    world = World()
    world.happens(TurnAsked(5))
    world.happens(TrainerSent(world.trainer, asked("train", 6)))
    (turns, trainer) = world.plane.requesters
    assert isinstance(turns, Turns)
    assert isinstance(trainer, TrainerRequester)
    assert turns.answered == {}, "nothing is told before it is in the ledger"
    world.commit()
    assert turns.answered == {5: [0, 1]}
    assert world.delivered == [6]
    assert [request.purpose for request in world.plane.groups.requests.values()] == ["train"]
    assert world.plane.groups.missing_tokens() == 0
