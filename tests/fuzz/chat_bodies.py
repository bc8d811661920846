"""What an agent's client sends: bodies of every dialect, of conversations that were edited, cut and mixed.

Whatever it is, it is refused in the documented form, or it is a request: its messages are found in a session or begin a
branch there, they become tokens, and its answer and its stream are JSON, the same each time.
"""

from __future__ import annotations

import json
import string
from random import Random
from typing import Any

import msgspec

from gyre.chat.dialects import COUNT_TOKENS, DIALECTS
from gyre.chat.history import ROOT, TurnHistory, locate
from gyre.chat.messages import Message, ToolCall
from gyre.chat.plain import PlainRenderer
from gyre.chat.requests import ChatRefused, FinishedTurn, said
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.fuzz.inputs import as_json, damaged, noise, twisted
from tests.fuzz.target import Broken, Target

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "1"}'}}
DRAWN = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "stop_token_ids": [5],
    "ignore_eos": True,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **DRAWN,
        "model": "policy",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "short"}]},
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "h"},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "max_completion_tokens": 8,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "1+1="},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "h"}]},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": "1"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        ],
        "instructions": "short",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 8,
        "stream": True,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "short"}],
        "messages": [
            {"role": "user", "content": "1+1="},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": ""},
                    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": "1"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "2"}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "max_tokens": 8,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "1+1="}]},
    "/inference/v1/generate": {
        "token_ids": [1, 2, 3],
        "sampling_params": {**DRAWN, "max_tokens": 8, "logprobs": 1, "skip_special_tokens": False},
    },
    "/v1/completions": {**DRAWN, "prompt": [1, 2, 3], "max_tokens": 8, "logprobs": 1, "stream": True},
}
TOKENIZER = CharTokenizer(string.digits + "+-*=[]:?")
ANSWERS = ("[1]", "2=[1]", "12", "[", "]")
TURNS = [
    TurnHistory(
        ROOT,
        (Message("system", "short"), Message("user", "1+1=")),
        Message("assistant", "", "h", (ToolCall("call_1", "f", '{"a": "1"}'),)),
    ),
    TurnHistory(0, (Message("tool", "2", tool_call_id="call_1"),), Message("assistant", "2")),
]
"""A session that the bodies go on from, while they are as they should be."""


class ChatBodies(Target):
    name = "chat bodies"

    def start(self) -> None:
        self._renderer = PlainRenderer(TOKENIZER)

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        dialect = draw.choice((*DIALECTS, COUNT_TOKENS))
        sent.append(_body(BODIES[dialect.path], draw))
        try:
            asked = dialect.read(sent[0])
        except ChatRefused as error:
            if error.status != 422 or not error.reason or len(str(error)) > 4000:
                raise Broken(f"it is refused as {error.status} {error.reason}: {str(error)[:200]}") from None
            told = dialect.refusal(error.status, error.reason, str(error), error.param)
            msgspec.json.decode(msgspec.json.encode(told))
            return False
        found = locate(TURNS, asked.messages)
        before = sum(1 + len(TURNS[at].messages) for at in range(found.parent + 1))
        if before + len(found.new) != len(asked.messages):
            raise Broken("messages of the request are lost")
        if asked.prompt_ids is None:
            prompt = self._renderer.render(asked.messages, asked.tools)
        else:
            prompt = asked.prompt_ids.tolist()
        drawn = [int(one) for one in TOKENIZER.encode(draw.choice(ANSWERS))]
        message = said(self._renderer.parse(prompt, drawn, asked.tools), asked, "text", 2, "s")
        texts, logprobs = self._renderer.written(drawn), [-0.5] * len(drawn)
        finish = draw.choice(("stop", "length"))
        reply = FinishedTurn(
            "id", 1, asked.model, message, finish, len(prompt), prompt, drawn, logprobs, texts
        )
        msgspec.json.decode(msgspec.json.encode(dialect.answer(asked, reply)))
        if list(dialect.events(asked, reply)) != list(dialect.events(dialect.read(sent[0]), reply)):
            raise Broken("the same again is told in other bytes")
        return True


def _body(good: dict[str, Any], draw: Random) -> bytes:
    match draw.randrange(6):
        case 0:
            return damaged(json.dumps(good).encode(), draw)
        case 1:
            return noise(draw)
        case _:
            return as_json(twisted(good, draw, wide=True))
