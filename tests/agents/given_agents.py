"""Agents that a job's section names by their import path."""

from __future__ import annotations

import asyncio
import threading

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
