"""Agents that a job's section names by their import path."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import aiohttp

from gyre.agents import BlockingSession, Session

GATE = threading.Event()


async def scores(session: Session) -> float:
    return 1.0 if (await session.chat([{"role": "user", "content": "x"}])).content == "yes" else 0.0


async def stays(session: Session) -> float:
    await asyncio.sleep(1000.0)
    return 1.0


async def blocks(session: Session) -> float:
    GATE.wait(60.0)  # as code does that waits without `await`
    return 1.0


def asks_an_sdk(session: BlockingSession) -> float:
    import openai

    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as sdk:
        told = sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    return 1.0 if told.choices[0].message.content == "yes" else 0.0


async def of_miles(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """As agents of miles ask: without a key."""
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}], **request_kwargs}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/v1/chat/completions", json=body) as told,
    ):
        assert told.status == 200
        answer = (await told.json())["choices"][0]["message"]["content"]
    return {"reward": float(answer == metadata["answer"]), "seen": {**kwargs, **request_kwargs}}


def scored_as_seen(metadata: dict[str, Any]) -> float:
    return 0.5 if metadata["seen"] == {"deep": True, "temperature": 1.0} else 0.0


class LoopOfVerl:
    """Made and run as verl's AgentLoopBase is; it goes on from what it drew, with a token of its own between."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any) -> None:
        self.most = trainer_config.config.rollout.max_turns
        self.server_manager = server_manager

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        path, mask = list(row["ids"]), []
        for _ in range(self.most):
            told = await self.server_manager.generate(
                request_id="x", prompt_ids=path, sampling_params=sampling_params, image_data=None
            )
            path += [*told.token_ids, 9]
            mask += [1] * len(told.token_ids) + [0]
        return SimpleNamespace(
            prompt_ids=row["ids"],
            response_ids=path[len(row["ids"]) :],
            response_mask=mask,
            reward_score=row["score"],
            raw_prompt=row["raw_prompt"],
        )


def scored_by_length(output: Any, row: dict[str, Any]) -> float:
    return len(output.response_ids) / 10


class HalfRemembering:
    def reset(self, task: Any, seed: int) -> str:
        return ""

    def step(self, message: Any) -> Any:
        return "", 0.0, True

    def snapshot(self) -> bytes:
        return b""


class Stepless:
    def reset(self, task: Any, seed: int) -> str:
        return ""


def no_session() -> float:
    return 1.0
