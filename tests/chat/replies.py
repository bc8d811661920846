"""Finished turns, for the tests of what clients are answered."""

from __future__ import annotations

import json
from typing import Any

from gyre.chat.messages import Message, ToolCall
from gyre.chat.requests import FinishedTurn

CALL = ToolCall("call_1", "calculator", '{"expression": "37*58"}')
CALLS = Message("assistant", "let me see", "a product", (CALL,))
ANSWERS = Message("assistant", "It is 2146.")


def reply(message: Message = ANSWERS, finish: str = "stop", **more: Any) -> FinishedTurn:
    fields: dict[str, Any] = {
        "prompt_length": 3,
        "prompt_ids": [1, 5, 6],
        "token_ids": [7, 8, 2],
        "logprobs": [-0.5, -0.25, 0.0],
        "token_texts": ["It is", " 2146.", "\ufffd"],
        "versions": [[4, 0, 2], [5, 2, 3]],
    }
    return FinishedTurn("turn-1", 1_700_000_000, "policy", message, finish, **(fields | more))


def events_of(stream: bytes) -> list[tuple[str, Any]]:
    """The name and the value of each event."""
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
