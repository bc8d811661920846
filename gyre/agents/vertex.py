"""The vertex of the role `agent`: a process that runs sessions.

Two event loops, each on a thread of its own: the user's code and its requests in one, what the manager hears of the
worker in the other. So code that holds up its loop for a while does not cost the worker its sessions.

Invariants:
- *the vertex dies with its loops*: a loop that ended by an error, or that the user's code has blocked for too long,
  makes `health()` raise, and the vertex is replaced; its sessions go on elsewhere.

This module must not know how a session is run.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from gyre.agents.client import SessionClient
from gyre.agents.relay import Relay
from gyre.agents.runner import LEAVE_S, SessionRunner, agent_of, hand_back, keep_beating
from gyre.config.plugins import AGENT, ENVIRONMENT
from gyre.config.sections import AgentRoleSettings, read_section
from gyre.errors import UserCodeError
from gyre.rollouts.protocol.endpoint import read_endpoint, read_trust
from gyre.workloads.base import BaseWorkload
from gyre.workloads.loop_thread import LoopThread

BLOCKED_S = 60.0
"""How long the user's code may hold up the event loop that all its sessions share."""

START_S = 10.0
"""For opening a port on loopback: no time, unless the machine is busy."""

THREADS_A_SESSION = 8
"""Threads that may be left behind for each session that runs at once, before the process is replaced."""


class AgentWorker(BaseWorkload):
    """Runs the sessions of `config.agent`. It has no operators: work comes from the rollout manager."""

    def setup(self) -> None:
        self.settings = read_section(AgentRoleSettings, self.config, "agent")
        kind = ENVIRONMENT if self.settings.environment else AGENT
        found = kind.load(self.settings.environment or self.settings.function)
        self._code = LoopThread("gyre-agent-code")
        self._beats = LoopThread("gyre-agent-beats")
        self._beating, self._client = self._new_client(), self._new_client()
        self._relay = Relay()
        self.runner = SessionRunner(
            self._client,
            agent_of(found, self.settings, self.config),
            self.settings,
            config=self.config,
            relay=self._relay,
            owner=self,
        )
        self._code.closing, self._beats.closing = self._close, self._beating.close
        self._code.call(self._relay.start(), START_S)
        self._code.begin(self.runner.run())
        self._beats.begin(keep_beating(self._beating, lambda: self.runner.held, self._lost))

    def _new_client(self) -> SessionClient:
        directory = self.context.directory
        return SessionClient(
            lambda: read_endpoint(directory),
            worker=f"{self.role}-{self.rank}",
            tls=lambda: read_trust(directory),
        )

    async def _close(self) -> None:
        await self._relay.close()
        await self._client.close()

    def _lost(self, sessions: set[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its sessions with it
            self._code.loop.call_soon_threadsafe(self.runner.lose, sessions)

    def noted(self, kind: str, details: dict[str, Any]) -> None:
        print(f"{kind} {details}", flush=True)
        self.context.report(kind, {"vertex": f"{self.role}-{self.rank}", **details})

    def progressed(self, fields: dict[str, Any]) -> None:
        self.context.progress.tick(**fields)

    def health(self) -> dict[str, Any]:
        runner = self.runner
        for loop in (self._code, self._beats):
            if loop.error is not None:
                raise RuntimeError("the agent's worker has stopped") from loop.error
        silent_s = time.monotonic() - runner.last_turn
        if silent_s > BLOCKED_S:
            raise UserCodeError(
                f"the agent's code has blocked the event loop of its sessions for {silent_s:.0f} s.",
                hint="Await what takes long, or call it with session.tool(function), which takes a thread.",
            )
        most = THREADS_A_SESSION * self.settings.concurrency
        if runner.threads > most:
            raise UserCodeError(
                f"the agent's code has {runner.threads} calls that do not end.",
                hint="Give what it waits for a timeout.",
            )
        return {
            "sessions": len(runner.held),
            "ended": dict(runner.counts.ended),
            "lost": runner.counts.lost,
            "left_behind": runner.counts.left_behind,
            "threads": runner.threads,
            "faults_in_a_row": runner.faults,
            "last_fault": runner.last_fault,
            "paused_s": runner.paused_s,
        }

    def teardown(self) -> None:
        """Interrupt the sessions, and hand them back: they go on elsewhere."""
        self._code.stop()
        with contextlib.suppress(Exception):  # then the manager hands them out after the worker's silence
            self._beats.call(hand_back(self._beating, self.runner.interrupted), LEAVE_S)
        self._beats.stop()
