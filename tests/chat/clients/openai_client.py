"""What an agent does with the package `openai`, in an environment that need not have Gyre: each scenario against a
session of its own. Prints what came of each as JSON.

    python openai_client.py http://127.0.0.1:PORT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

URL = sys.argv[1]
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": SCHEMA}}
]
FLAT: list[Any] = [{"type": "function", "name": "calculator", "parameters": SCHEMA, "strict": True}]
ASKED: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "37*58-9=?"}]


def client(session: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/s/{session}/v1", api_key="secret")


def computed(arguments: str) -> str:
    left, operator, right = json.loads(arguments)["expression"].partition("*")
    if not operator:
        left, operator, right = left.partition("-")
        return str(int(left) - int(right))
    return str(int(left) * int(right))


def chat(session: str, **more: Any) -> Any:
    """A loop over turns, as agents have it."""
    messages = list(ASKED)
    told: list[Any] = []
    while True:
        made = client(session).chat.completions.create(model="policy", messages=messages, tools=TOOLS, **more)
        choice = made.choices[0]
        told.append(made.model_dump())
        messages.append(choice.message)  # as it came, with all keys
        if choice.finish_reason != "tool_calls":
            return told
        for call in choice.message.tool_calls or ():
            result = computed(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def chat_tokens(session: str) -> Any:
    return chat(session, logprobs=True, max_completion_tokens=64, extra_body={"return_token_ids": True})


def chat_streamed(session: str) -> Any:
    messages: list[Any] = list(ASKED)
    told: list[Any] = []
    while True:
        content, calls, reason, usage = "", [], "", None
        for chunk in client(session).chat.completions.create(
            model="policy",
            messages=messages,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                reason = choice.finish_reason or reason
        told.append({"content": content, "reason": reason, "usage": usage and usage.model_dump()})
        if reason != "tool_calls":
            return told
        functions = [
            {"id": one.id, "type": "function", "function": one.function.model_dump()} for one in calls
        ]
        messages.append({"role": "assistant", "content": content or None, "tool_calls": functions})
        for one in calls:
            result = computed(one.function.arguments)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})


def chat_helper(session: str) -> Any:
    """The package's own accumulator of a stream."""
    with client(session).chat.completions.stream(model="policy", messages=ASKED, tools=TOOLS) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].model_dump()


def responses(session: str) -> Any:
    items: list[Any] = [{"role": "user", "content": "37*58-9=?"}]
    told: list[Any] = []
    while True:
        made = client(session).responses.create(
            model="policy", instructions="Be short.", input=items, tools=FLAT, include=[]
        )
        told.append(
            {"status": made.status, "text": made.output_text, "kinds": [one.type for one in made.output]}
        )
        items += made.output
        calls = [one for one in made.output if one.type == "function_call"]
        if not calls:
            return told
        for one in calls:
            result = computed(one.arguments)
            items.append({"type": "function_call_output", "call_id": one.call_id, "output": result})


def responses_streamed(session: str) -> Any:
    items: list[Any] = [{"role": "user", "content": "37*58-9=?"}]
    told: list[Any] = []
    while True:
        with client(session).responses.stream(model="policy", input=items, tools=FLAT) as stream:
            kinds = [event.type for event in stream]
            made = stream.get_final_response()
        told.append({"text": made.output_text, "events": kinds})
        items += [
            one.model_dump(exclude_none=True, exclude={"parsed", "parsed_arguments"}) for one in made.output
        ]
        items = [{key: value for key, value in one.items() if key != "parsed_arguments"} for one in items]
        calls = [one for one in made.output if one.type == "function_call"]
        if not calls:
            return told
        for one in calls:
            result = computed(one.arguments)
            items.append({"type": "function_call_output", "call_id": one.call_id, "output": result})


def completions(session: str) -> Any:
    made = client(session).completions.create(model="policy", prompt=[1, 5, 6], max_tokens=64, logprobs=1)
    return made.model_dump()


def refused(session: str) -> Any:
    told = []
    asks: list[Callable[[], Any]] = [
        lambda: chat(session, seed=1),
        lambda: chat(session, tool_choice="required"),
        lambda: client("nobody").chat.completions.create(model="policy", messages=ASKED),
        lambda: client(session).responses.create(model="policy", input="a", conversation="conv_1"),
        lambda: openai.OpenAI(base_url=f"{URL}/s/{session}/v1", api_key="wrong").models.list(),
        lambda: openai.OpenAI(base_url=f"{URL}/s/{session}/v1", api_key="wrong").chat.completions.create(
            model="policy", messages=ASKED
        ),
    ]
    for ask in asks:
        try:
            ask()
            told.append("answered")
        except openai.APIStatusError as error:
            told.append([type(error).__name__, error.status_code, error.code, error.param, error.message])
    return told


SCENARIOS: dict[str, Callable[[str], Any]] = {
    "chat": chat,
    "chat-tokens": chat_tokens,
    "chat-streamed": chat_streamed,
    "chat-helper": chat_helper,
    "responses": responses,
    "responses-streamed": responses_streamed,
    "completions": completions,
    "refused": refused,
    "retry-503": chat,
    "retry-cut": chat,
    "retry-cut-body": chat,
    "retry-responses": responses,
}

if __name__ == "__main__":
    with ThreadPoolExecutor() as pool:  # an SDK sleeps before it asks again
        running = {name: pool.submit(run, name) for name, run in SCENARIOS.items()}
        print(json.dumps({name: one.result() for name, one in running.items()}))
