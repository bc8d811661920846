"""A worker of sessions as a process of its own: `python session_worker.py DIR NAME`.

Each session has four turns by token ids. What a turn adds, and the reward, follow from what was drawn before, so that a
session which went on from something else comes out otherwise.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from gyre.agents.client import Claimed, SessionClient
from gyre.agents.outcomes import Outcome, SessionLost

TURNS, TOOL_S, AT_ONCE = 4, 0.05, 16


def endpoint(directory: Path) -> tuple[str, str] | None:
    try:
        told = json.loads((directory / "rollouts.json").read_text())
    except OSError:
        return None
    return told["url"], told["token"]


async def run(client: SessionClient, session: Claimed) -> None:
    path = list(session.prompt_ids)
    for turn in range(TURNS):
        params = {"max_tokens": session.sampling["max_new_tokens"], "temperature": 1.0, "ignore_eos": True}
        body = json.dumps({"token_ids": path, "sampling_params": params}).encode()
        answer = await client.ask("POST", f"{session.path}/inference/v1/generate", body, within_s=120.0)
        if answer.status in (404, 410):
            raise SessionLost(answer.body.decode())
        assert answer.status == 200, (answer.status, answer.body)
        drawn = answer.json()["choices"][0]["token_ids"]
        path += [*drawn, 1 + sum(drawn) % 50, 1 + turn]
        await asyncio.sleep(TOOL_S)
    await client.end(session, Outcome("scored", float(sum(path) % 7), "", {}))


async def work(directory: Path, name: str) -> None:
    client = SessionClient(lambda: endpoint(directory), worker=name)
    running: dict[str, asyncio.Task[None]] = {}

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.3)
            try:
                for lost in await client.beat(list(running)):
                    if (task := running.pop(lost, None)) is not None:
                        task.cancel()
            except TimeoutError:
                pass  # the manager is away: the next one is asked

    async def guarded(session: Claimed) -> None:
        try:
            await run(client, session)
        except SessionLost:
            print(f"{session.id} is lost", flush=True)
        finally:
            running.pop(session.id, None)

    beating = asyncio.create_task(beat())
    while not beating.done():
        try:
            for session in await client.claim(max(1, AT_ONCE - len(running)), 0.5):
                running[session.id] = asyncio.create_task(guarded(session))
        except TimeoutError:
            pass
        if len(running) >= AT_ONCE:
            await asyncio.sleep(0.1)
    await beating


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))
