"""What a manager sends: an agent and a trainer take it, or refuse it by a GyreError, which ends the connection."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from gyre.engines.process import EngineCommand
from gyre.errors import GyreError
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.frames import (
    Ack,
    Assign,
    Assignment,
    Attached,
    Cancel,
    DevicesReturned,
    Done,
    Drain,
    Failed,
    Finished,
    FinishedSample,
    Frame,
    Prompt,
    SampleCounts,
    Sleep,
    Wake,
    Weights,
    Welcome,
    WindowStatus,
)
from gyre.rollouts.samples import pack_groups
from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
from tests.fuzz.frames import good_groups, good_trees, hostile_frame
from tests.fuzz.inputs import damaged, packed, twisted
from tests.fuzz.target import Target
from tests.rollouts.frames import SELDOM
from tests.rollouts.owners import Commands, NowhereKnown

MOST_FRAMES = 10


def said(draw: Random, good: Frame) -> bytes:
    match draw.randrange(6):
        case 0:
            return hostile_frame(draw)
        case 1 | 2:
            return encode(good)
        case 3:
            return damaged(encode(good), draw)
        case _:
            return packed(twisted(msgpack.unpackb(encode(good), raw=False, strict_map_key=False), draw))


class _NoWeights:
    """In the place of an agent's weights: nothing is fetched."""

    version, checksum, source = -1, "", ""

    def __init__(self, real: Any) -> None:
        self.settle = real.settle

    async def load(self, weights: Weights, url: str, key: str) -> None:
        pass

    fetch_ahead = load

    def close(self) -> None:
        pass

    def lost(self) -> None:
        pass


class Agents(Target):
    name = "agent"
    share = 0.02
    traced = False

    def start(self) -> None:
        good_trees()
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-fuzz-")
        self._loop = asyncio.new_event_loop()

    def stop(self) -> None:
        self._loop.close()
        self._folder.cleanup()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        return self._loop.run_until_complete(self._case(draw, sent))

    async def _case(self, draw: Random, sent: list[bytes]) -> bool:
        settings = AgentSettings(name="a", max_running=8, kv_tokens=1 << 16, cache=Path(self._folder.name))
        agent = Agent(settings, NowhereKnown(), Commands(lambda folder, version: EngineCommand(("false",))))
        agent._weights.close()
        agent._weights = _NoWeights(agent._weights)  # type: ignore[assignment]
        try:
            for turn in range(draw.randrange(2, MOST_FRAMES)):
                good = draw.choice(TO_AGENTS) if draw.randrange(2) else self._work(draw)
                sent.append(said(draw, WELCOME if turn == 0 else good))
                frame = decode(sent[-1])
                if turn == 0:
                    if not isinstance(frame, Welcome):
                        return False
                    agent.welcomed(frame, "http://127.0.0.1:1", "token")
                else:
                    agent.received(frame)
                if draw.randrange(3) == 0:
                    await asyncio.sleep(0)
                self._report(agent)
            await asyncio.sleep(0)
            if agent._fatal is not None:
                raise agent._fatal
        except GyreError:
            return False
        finally:
            await agent._end()
        return True

    def _work(self, draw: Random) -> Assign:
        work = [
            Assignment(
                row=draw.randrange(9), lease=draw.randrange(9), key=draw.randrange(9), request_id=draw.randrange(3),
                prior=draw.choice((b"", b"\1\0\0\0")), seed=4,
            )
            for _ in range(draw.randrange(4))
        ]  # fmt: skip
        prompts = [
            Prompt(request_id=number, tokens=b"\1\0\0\0", sampling={"max_new_tokens": 9})
            for number in range(2)
        ]
        return Assign(prompts=prompts, work=work)

    def _report(self, agent: Agent) -> None:
        """What it then says of its samples is a report of the protocol."""
        frame, _ = agent._reports.next(
            agent._generation.samples.values(), everything=True, made_tokens=0, interval_s=0.25, now=1.0
        )
        decode(encode(frame))
        decode(encode(agent.first_frame()))


class Trainers(Target):
    name = "trainer"
    share = 0.05
    traced = False

    def start(self) -> None:
        good_trees()
        self._client = RolloutClient(NowhereKnown(), HearsOfRollouts(), term=1, samples_ahead=True)

    def stop(self) -> None:
        self._client.close()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        client = self._client
        client.welcomed(Attached(protocol=1, epoch=1, version=0), "http://127.0.0.1:1", "token")
        for _ in range(draw.randrange(1, MOST_FRAMES)):
            sent.append(said(draw, self._good(draw)))
            try:
                client.received(decode(sent[-1]))
            except GyreError:
                return False
        return True

    def _good(self, draw: Random) -> Frame:
        if draw.randrange(2):
            return draw.choice(TO_TRAINERS)
        groups = pack_groups(good_groups())
        if draw.randrange(2):  # groups that are not right in a frame that is
            groups = draw.choice(
                (damaged(groups, draw), packed(twisted(msgpack.unpackb(groups, strict_map_key=False), draw)))
            )
        return Done(purpose="train", groups=groups, more=draw.random() < 0.3)


WELCOME = next(frame for frame in SELDOM if isinstance(frame, Welcome))
TO_AGENTS = [
    frame for frame in SELDOM if isinstance(frame, Assign | Ack | Cancel | Weights | Sleep | Wake | Drain)
]
TO_TRAINERS = [
    *(
        one
        for one in SELDOM
        if isinstance(one, Failed | Finished | DevicesReturned | WindowStatus | SampleCounts)
    ),
    Finished(purpose="a", samples=[FinishedSample(group=1, index=0, tokens=b"\1\0\0\0" * 3, finish="stop")]),
]
