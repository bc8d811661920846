"""What an agent does with the package `anthropic`: see `openai_client`.

python anthropic_client.py http://127.0.0.1:PORT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic

URL = sys.argv[1]
TOOLS: list[Any] = [
    {
        "name": "calculator",
        "description": "Computes.",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
]
ASKED: list[Any] = [{"role": "user", "content": "37*58-9=?"}]


def client(session: str, key: str = "secret") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{URL}/s/{session}", api_key=key)


def computed(given: Any) -> str:
    left, operator, right = given["expression"].partition("*")
    if not operator:
        left, operator, right = left.partition("-")
        return str(int(left) - int(right))
    return str(int(left) * int(right))


def loop(ask: Callable[[list[Any]], Any]) -> Any:
    messages = list(ASKED)
    told = []
    while True:
        made = ask(messages)
        told.append(made.model_dump())
        messages.append({"role": "assistant", "content": made.content})
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": computed(one.input)}
            for one in made.content
            if one.type == "tool_use"
        ]
        if made.stop_reason != "tool_use":
            return told
        messages.append({"role": "user", "content": results})


def whole(session: str) -> Any:
    return loop(
        lambda messages: client(session).messages.create(
            model="policy", max_tokens=64, system="Be short.", messages=messages, tools=TOOLS
        )
    )


def streamed(session: str) -> Any:
    def ask(messages: list[Any]) -> Any:
        with client(session).messages.stream(
            model="policy", max_tokens=64, system="Be short.", messages=messages, tools=TOOLS
        ) as stream:
            for _ in stream:
                pass
            return stream.get_final_message()

    return loop(ask)


def counted(session: str) -> Any:
    return client(session).messages.count_tokens(model="policy", messages=ASKED, tools=TOOLS).input_tokens


def cut(session: str) -> Any:
    return client(session).messages.create(model="policy", max_tokens=3, messages=ASKED).stop_reason


def refused(session: str) -> Any:
    told = []
    asks: list[Callable[[], Any]] = [
        lambda: client(session).messages.create(
            model="policy", max_tokens=8, messages=ASKED, tools=TOOLS, tool_choice={"type": "any"}
        ),
        lambda: client(session).messages.create(
            model="policy", max_tokens=8, messages=ASKED, stop_sequences=[""]
        ),
        lambda: client("nobody").messages.create(model="policy", max_tokens=8, messages=ASKED),
        lambda: client(session, "wrong").messages.create(model="policy", max_tokens=8, messages=ASKED),
    ]
    for ask in asks:
        try:
            ask()
            told.append("answered")
        except anthropic.APIStatusError as error:
            told.append([type(error).__name__, error.status_code, error.message])
    return told


SCENARIOS: dict[str, Callable[[str], Any]] = {
    "whole": whole,
    "streamed": streamed,
    "counted": counted,
    "cut": cut,
    "refused": refused,
    "retry-503": whole,
    "retry-cut": whole,
    "retry-cut-body": whole,
}

if __name__ == "__main__":
    with ThreadPoolExecutor() as pool:  # an SDK sleeps before it asks again
        running = {name: pool.submit(run, name) for name, run in SCENARIOS.items()}
        print(json.dumps({name: one.result() for name, one in running.items()}))
