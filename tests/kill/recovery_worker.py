"""The vertex of the role `agent` as a process of its own: `python recovery_worker.py DIR RANK RECOVERY`.

Its sessions are those of `Tally`, which has in itself alone what was drawn so far. What it says next, and the reward,
follow from that, so that a session which went on from something else comes out otherwise. What is called for which
session goes to DIR/calls.jsonl, a line each, and the process dies where DIR/fault says so (`fault_points`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

from gyre.agents import AgentWorker, runner, vertex
from gyre.agents.client import Claimed, ClientAnswer, SessionClient
from gyre.agents.environments import EpisodeProgress
from gyre.agents.outcomes import Outcome
from gyre.agents.runner import Agent, agent_of
from gyre.agents.session import CHAT, Session
from gyre.workloads.base import WorkloadContext
from tests.kill.fault_points import END, ENDED, KEPT, TOLD, TOOL, TURN, FaultPoints

TURNS, TOOL_S, LOOK_S = 4, 0.05, 0.02

SESSION: ContextVar[str] = ContextVar("session")


class Process:
    """What this process is: set before any session runs."""

    directory: Path
    points: FaultPoints
    worker: AgentWorker
    in_tool = 0
    """Sessions in a tool now."""
    is_gathering = False
    """Whether sessions stay in their tool until all of them are in one."""


def note(call: str, step: int) -> None:
    line = json.dumps({"session": SESSION.get(), "call": call, "step": step, "pid": os.getpid()}) + "\n"
    file = os.open(Process.directory / "calls.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


class Tally:
    def __init__(self) -> None:
        self._sum, self._steps = 0, 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self._sum, self._steps = seed, 0
        note("reset", 0)
        return str(self._sum)

    async def step(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        self._steps += 1
        self._sum = crc32(message["content"].encode(), self._sum)
        note("step", self._steps)
        Process.in_tool += 1
        try:
            await self._dies()
            await asyncio.sleep(TOOL_S)
        finally:
            Process.in_tool -= 1
        return str(self._sum), self._sum % 7 / 8, self._steps == TURNS

    async def _dies(self) -> None:
        Process.is_gathering |= Process.points.due(TOOL)
        while Process.is_gathering:
            if Process.in_tool == len(Process.worker.runner.held):
                Process.points.die()
            await asyncio.sleep(LOOK_S)

    def snapshot(self) -> bytes:
        return json.dumps([self._sum, self._steps]).encode()

    async def restore(self, data: bytes) -> None:
        self._sum, self._steps = json.loads(data)
        note("restore", self._steps)


class MortalClient(SessionClient):
    async def ask(self, method: str, path: str, body: bytes, **named: Any) -> ClientAnswer:
        asking = asyncio.ensure_future(super().ask(method, path, body, **named))
        if path.endswith(CHAT) and Process.points.due(TURN):
            await self._die_while_drawn(asking)
        return await asking

    async def _die_while_drawn(self, asking: asyncio.Future[ClientAnswer]) -> None:
        """Die when the manager has some tokens of the turn, and not all; it is answered where it was too quick."""
        while not asking.done():
            seen = await super().ask("GET", f"/v1/sessions/{SESSION.get()}", b"", within_s=10.0)
            turns = seen.json()["turns"]
            if turns and turns[-1]["drawn"] and not asking.done():
                Process.points.die()
            await asyncio.sleep(LOOK_S)

    async def snapshot(self, session: Claimed, data: bytes) -> None:
        step = json.loads(data)["turns"]
        note("sent", step)
        await super().snapshot(session, data)
        note("kept", step)
        if Process.points.due(TOLD):  # before the manager can write what it has not written yet
            os.kill(json.loads((Process.directory / "rollouts.json").read_text())["pid"], signal.SIGKILL)
            Process.points.die()
        if Process.points.due(KEPT):
            Process.points.die()

    async def end(self, session: Claimed, outcome: Outcome) -> None:
        await super().end(session, outcome)
        if Process.points.due(ENDED):
            Process.points.die()

    async def _attempt(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], answer_s: float
    ) -> ClientAnswer | None:
        if path.endswith("/end") and Process.points.due(END):
            self._send_and_die(path, body)
        return await super()._attempt(method, path, body, headers, answer_s)

    def _send_and_die(self, path: str, body: bytes) -> None:
        """The request is on its way, whole, before this process ends."""
        where = self._endpoint()
        assert where is not None
        url = urlsplit(where[0])
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {where[1]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((url.hostname, url.port)) as connection:
            connection.sendall(head.encode() + body)
            Process.points.die()


def named_agent_of(found: Any, settings: Any, config: Mapping[str, Any]) -> Agent:
    """The agent that the vertex would run, which knows for whom it is called."""
    agent = agent_of(found, settings, config)

    async def run(session: Session, progress: EpisodeProgress) -> Outcome:
        SESSION.set(session.id)
        return await agent(session, progress)

    return run


async def work(directory: Path, rank: int, recovery: str) -> None:
    Process.directory, Process.points = directory, FaultPoints(directory)
    runner.BEAT_EVERY_S = 0.3
    vertex.SessionClient, vertex.agent_of = MortalClient, named_agent_of  # type: ignore[misc, assignment]
    config = {"agent": {"environment": "tests.kill.recovery_worker:Tally", "recovery": recovery}}
    Process.worker = worker = AgentWorker()
    worker.context = WorkloadContext("job", "agent", rank, rank + 1, config=config, directory=directory)
    worker.setup()
    while True:
        worker.health()
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    # under its own name, by which the vertex finds the environment: else there would be two of `Process`
    from tests.kill import recovery_worker

    asyncio.run(recovery_worker.work(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
