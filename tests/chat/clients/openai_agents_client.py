"""What openai-agents does, by Responses and by chat completions: see `openai_client`.

python openai_agents_client.py http://127.0.0.1:PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

URL = sys.argv[1]


@function_tool
def calculator(expression: str) -> str:
    """Computes."""
    left, operator, right = expression.partition("*")
    if not operator:
        left, operator, right = left.partition("-")
        return str(int(left) - int(right))
    return str(int(left) * int(right))


async def run(kind: Any, session: str, *, streamed: bool = False) -> str:
    client = AsyncOpenAI(base_url=f"{URL}/s/{session}/v1", api_key="secret")
    model = kind(model="policy", openai_client=client)
    agent = Agent(name="a", instructions="Be short.", model=model, tools=[calculator])
    if streamed:
        running = Runner.run_streamed(agent, "37*58-9=?")
        async for _ in running.stream_events():
            pass
        return str(running.final_output)
    return str((await Runner.run(agent, "37*58-9=?")).final_output)


async def main() -> None:
    told = {
        "responses": await run(OpenAIResponsesModel, "responses"),
        "chat": await run(OpenAIChatCompletionsModel, "chat"),
        "chat-streamed": await run(OpenAIChatCompletionsModel, "chat-streamed", streamed=True),
        "responses-streamed": await run(OpenAIResponsesModel, "responses-streamed", streamed=True),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
