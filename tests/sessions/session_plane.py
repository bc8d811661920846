"""A live manager of a job with agents, a trainer that asks for groups, and workers that run sessions by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gyre.rollouts.manager.sessions.front import SessionFront
from gyre.rollouts.plane.session_ledger import SessionLedger
from gyre.rollouts.plane.settings import SessionSettings
from gyre.store import open_store
from tests.rollouts.plane import Plane, ScriptedAgent, ScriptedTrainer, until

GENERATE = "/inference/v1/generate"


class SessionPlane(Plane):
    trainer_peer: ScriptedTrainer

    @property
    def front(self) -> SessionFront:
        return next(one for one in self.manager.fronts if isinstance(one, SessionFront))

    @property
    def ledger(self) -> SessionLedger:
        return self.front.ledger

    async def asked(self, ids: Sequence[int], *, n: int = 1, **other: Any) -> ScriptedTrainer:
        """A trainer that has published version 0 and asked for these groups."""
        trainer = await self.trainer()
        await trainer.publish(0)
        await trainer.ask(ids, n=n, **other)
        return trainer

    async def claim(self, worker: str = "w", most: int = 8, wait_s: float = 20.0) -> list[dict[str, Any]]:
        status, told = await self.post(
            "/v1/sessions/claim", {"worker": worker, "most": most, "wait_s": wait_s}
        )
        assert status == 200, told
        sessions: list[dict[str, Any]] = told["sessions"]
        return sessions

    async def turn(self, session: dict[str, Any], ids: Sequence[int], **body: Any) -> tuple[int, Any]:
        return await self.post(f"{session['path']}{GENERATE}", generate_body(ids, **body))

    def turning(
        self, session: dict[str, Any], ids: Sequence[int], **body: Any
    ) -> asyncio.Task[tuple[int, Any]]:
        return asyncio.create_task(self.turn(session, ids, **body))

    def chatting(
        self,
        session: dict[str, Any],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] = (),
        **body: Any,
    ) -> asyncio.Task[tuple[int, Any]]:
        told = {
            "model": "policy",
            "messages": list(messages),
            **({"tools": list(tools)} if tools else {}),
            **body,
        }
        return asyncio.create_task(self.post(f"{session['path']}/v1/chat/completions", told))

    async def end(
        self, session: dict[str, Any], outcome: str = "scored", reward: float = 1.0, **more: Any
    ) -> tuple[int, Any]:
        name = session["path"].removeprefix("/s/")
        return await self.post(f"/v1/sessions/{name}/end", {"outcome": outcome, "reward": reward, **more})


def generate_body(ids: Sequence[int], **body: Any) -> dict[str, Any]:
    params = {"max_tokens": 50, "logprobs": 1, **body.pop("params", {})}
    return {"token_ids": list(ids), "sampling_params": params, **body}


def ids_of(told: Any) -> list[int]:
    found: list[int] = told["choices"][0]["token_ids"]
    return found


@contextlib.asynccontextmanager
async def session_plane(tmp_path: Path, **settings: Any) -> AsyncIterator[SessionPlane]:
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        plane = SessionPlane(store.rollouts("job"), tmp_path)
        await plane.start(sessions=SessionSettings(**settings))
        try:
            yield plane
        finally:
            for peer in plane.peers:
                await peer.socket.close()
            if plane.http is not None:
                await plane.http.close()
            await plane.manager.stop()


async def drawn(agent: ScriptedAgent, tokens: int = 3) -> list[int]:
    """The agent draws so many tokens for its next sample, and ends it."""
    (sample,) = await agent.work(1)
    row = sample.work.row
    await agent.report({row: tokens}, {row: "stop"})
    return sample.tokens


__all__ = ["SessionPlane", "drawn", "generate_body", "ids_of", "session_plane", "until"]
