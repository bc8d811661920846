"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

A user's message of theirs may hold several results of tools and words of the user: each result is a message of its own
here. What was thought is told, and passed over when it comes back.

This module must not know of other dialects, or of sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.chat.dialects.content import checked_messages, member, text_of, tool_of
from gyre.chat.dialects.dialect import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    checked_choice,
    encode,
    event,
    longest,
    stopping,
)
from gyre.chat.dialects.keys import MESSAGES, MESSAGES_TOOL, TOOL_CHOICE, decoded, invalid
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.request_body import Body, drawing, shown

UNPARSED = "unparsed_arguments"
"""The key of a call's `input`, which is an object, that has what the model wrote where that is none."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicMessages:
    path = "/v1/messages"

    def read(self, body: bytes) -> ChatRequest:
        return _read(body, is_counted=False)

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
        return {
            **_head(reply),
            "content": _blocks(reply.message),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stopped_by or None,
            "usage": _usage(reply, len(reply.token_ids)),
            "policy_versions": [list(one) for one in reply.versions],
        }

    def events(self, request: ChatRequest, reply: FinishedTurn) -> Iterator[bytes]:
        begun = {
            **_head(reply),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(reply, 0),
        }
        yield event({"type": "message_start", "message": begun}, "message_start")
        for at, block in enumerate(_blocks(reply.message)):
            empty, deltas = _streamed(block)
            yield _block_event("content_block_start", at, content_block=empty)
            for delta in deltas:
                yield _block_event("content_block_delta", at, delta=delta)
            yield _block_event("content_block_stop", at)
        yield event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_by or None},
                "usage": {"output_tokens": len(reply.token_ids)},
                "policy_versions": [list(one) for one in reply.versions],
            },
            "message_delta",
        )
        yield event({"type": "message_stop"}, "message_stop")

    def refusal(self, status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code, "param": param}}


class AnthropicCount(AnthropicMessages):
    """How many tokens a prompt would have: nothing is drawn, and there is no stream. Of the reply,
    `prompt_length` is enough."""

    path = "/v1/messages/count_tokens"

    def read(self, body: bytes) -> ChatRequest:
        return _read(body, is_counted=True)

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
        return {"input_tokens": reply.prompt_length}


def _read(body: bytes, *, is_counted: bool) -> ChatRequest:
    told = Body(MESSAGES, decoded(body))
    messages = _system(told.any("system"))
    for at, one in enumerate(told.listed("messages", MOST_MESSAGES, "messages")):
        messages += _messages(one, f"messages.{at}")
    tools = tuple(
        _tool(one, f"tools.{at}") for at, one in enumerate(told.listed("tools", MOST_TOOLS, "tools"))
    )
    if not is_counted and not told.has("max_tokens"):
        raise told.wrong("max_tokens", None, "a number: Anthropic's form requires it")
    sampling = drawing(told) | stopping(told, "stop_sequences") | longest(told, "max_tokens")
    are_read, parallel = _choice(told.any("tool_choice"))
    stream, model = told.flag("stream"), told.text("model") or ""
    told.end()
    return ChatRequest(
        checked_messages(tuple(messages)),
        tools,
        sampling,
        stream and not is_counted,
        model,
        calls_are_read=are_read,
        parallel_tool_calls=parallel,
    )


def _system(told: Any) -> list[Message]:
    text = text_of(told, "system")
    return [Message("system", text)] if text else []


def _messages(told: Any, path: str) -> list[Message]:
    if not isinstance(told, dict):
        raise invalid(f"{path}: {shown(told)} given, expected a message: an object.", path)
    role, content = told.get("role"), told.get("content")
    if role == "user":
        return _users(content, f"{path}.content")
    if role == "assistant":
        return [_assistants(content, f"{path}.content")]
    if role == "system":
        return [Message("system", text_of(content, f"{path}.content"))]
    raise invalid(f"{path}.role: {shown(role)} given, expected user or assistant.", f"{path}.role")


def _parts(content: Any, path: str) -> list[dict[str, Any]]:
    """The parts of a content that is no text."""
    if not isinstance(content, list) or len(content) > MOST_PARTS:
        raise invalid(
            f"{path}: {shown(content)} given, expected text or a list of at most {MOST_PARTS} parts.", path
        )
    for at, one in enumerate(content):
        if not isinstance(one, dict):
            raise invalid(f"{path}.{at}: {shown(one)} given, expected a part: an object.", f"{path}.{at}")
    return content


def _users(content: Any, path: str) -> list[Message]:
    """Results of tools, and between them what the user says."""
    if isinstance(content, str):
        return [Message("user", content)]
    made: list[Message] = []
    words: list[str] = []
    for at, part in enumerate(_parts(content, path)):
        if part.get("type") != "tool_result":
            words.append(text_of([part], path))
            continue
        if words:
            made.append(Message("user", "".join(words)))
            words = []
        call_id = member(part, "tool_use_id", f"{path}.{at}")
        if not call_id:
            raise invalid(
                f"{path}.{at}.tool_use_id: expected the id of the call.", f"{path}.{at}.tool_use_id"
            )
        text = text_of(part.get("content"), f"{path}.{at}.content")
        made.append(Message("tool", text, tool_call_id=call_id))
    if words or not made:
        made.append(Message("user", "".join(words)))
    return made


def _assistants(content: Any, path: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    words: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for at, part in enumerate(_parts(content, path)):
        kind = part.get("type")
        if kind == "thinking":
            reasoning.append(member(part, "thinking", f"{path}.{at}"))
        elif kind == "tool_use":
            calls.append(_call(part, f"{path}.{at}"))
        elif kind != "redacted_thinking":
            words.append(text_of([part], path))
    return Message("assistant", "".join(words), "".join(reasoning), tuple(calls))


def _call(part: dict[str, Any], path: str) -> ToolCall:
    call_id, name, told = member(part, "id", path), member(part, "name", path), part.get("input")
    if not call_id or not name or not isinstance(told, dict):
        raise invalid(f"{path}: expected a call with id, name and input, an object.", path)
    unparsed = told.get(UNPARSED)
    if len(told) == 1 and isinstance(unparsed, str):
        return ToolCall(call_id, name, unparsed)
    return ToolCall(call_id, name, encode(told).decode())


def _tool(told: Any, path: str) -> Tool:
    body = Body(MESSAGES_TOOL, told, path)
    return tool_of(body, body.any("input_schema"), "input_schema")


def _choice(told: Any) -> tuple[bool, bool]:
    """Whether calls are read, and whether there may be several."""
    if told is None:
        return True, True
    body = Body(TOOL_CHOICE, told, "tool_choice")
    kind, parallel = body.any("type"), not body.flag("disable_parallel_tool_use")
    body.end()
    if kind is None:
        raise body.wrong("type", kind, "auto or none")
    return checked_choice(kind, "tool_choice.type"), parallel


def _head(reply: FinishedTurn) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model}


def _usage(reply: FinishedTurn, drawn: int) -> dict[str, int]:
    return {"input_tokens": reply.prompt_length, "output_tokens": drawn}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for one in message.tool_calls:
        blocks.append({"type": "tool_use", "id": one.id, "name": one.name, "input": _input(one.arguments)})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as the object that the form wants."""
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # what a model writes is often no JSON
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def _stop_reason(reply: FinishedTurn) -> str:
    if reply.finish == "length":
        return "max_tokens"
    if reply.stopped_by:
        return "stop_sequence"
    return "tool_use" if reply.message.tool_calls else "end_turn"


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what makes it whole."""
    kind = block["type"]
    if kind == "text":
        return {"type": kind, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {"type": kind, "thinking": "", "signature": ""}, deltas
    return {**block, "input": {}}, [
        {"type": "input_json_delta", "partial_json": encode(block["input"]).decode()}
    ]


def _block_event(name: str, index: int, **more: Any) -> bytes:
    return event({"type": name, "index": index, **more}, name)
