"""OpenAI's `/v1/chat/completions`, with vLLM's `return_token_ids`.

This module must not know of other dialects, or of sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gyre.chat.dialects.content import checked_messages, member, text_of, tool_of
from gyre.chat.dialects.dialect import (
    MOST_MESSAGES,
    MOST_TOOLS,
    checked_choice,
    event,
    includes_usage,
    longest,
    stopping,
    token_logprobs,
    unsupported,
    usage_of,
)
from gyre.chat.dialects.keys import CHAT, FUNCTION, TOOL, decoded, invalid
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.request_body import Body, drawing, error_body, shown

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class OpenaiChat:
    path = "/v1/chat/completions"

    def read(self, body: bytes) -> ChatRequest:
        told = Body(CHAT, decoded(body))
        messages = tuple(
            _message(one, f"messages.{at}")
            for at, one in enumerate(told.listed("messages", MOST_MESSAGES, "messages"))
        )
        tools = tuple(
            _tool(one, f"tools.{at}") for at, one in enumerate(told.listed("tools", MOST_TOOLS, "tools"))
        )
        sampling = drawing(told) | stopping(told) | longest(told, "max_tokens", "max_completion_tokens")
        stream, usage = told.flag("stream"), includes_usage(told.any("stream_options"))
        request = ChatRequest(
            checked_messages(messages),
            tools,
            sampling,
            stream,
            told.text("model") or "",
            told.flag("logprobs"),
            told.flag("return_token_ids"),
            usage,
            checked_choice(told.any("tool_choice")),
            told.flag("parallel_tool_calls", True),
        )
        told.end()
        return request

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": None, "refusal": None} | _said(reply.message),
            "logprobs": _logprobs(reply) if request.logprobs else None,
            "finish_reason": _finish(reply),
            "policy_versions": [list(one) for one in reply.versions],
        }
        made = {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage_of(reply)}
        if request.token_ids:
            choice["token_ids"] = list(reply.token_ids)
            made["prompt_token_ids"] = list(reply.prompt_ids)
        return made

    def events(self, request: ChatRequest, reply: FinishedTurn) -> Iterator[bytes]:
        """The role; all that was said, with its tokens; the end; the usage, where it is asked for."""
        head = _head(reply, "chat.completion.chunk") | ({"usage": None} if request.usage else {})
        first = {**head, "choices": [_delta({"role": "assistant", "content": ""})]}
        if request.token_ids:
            first["prompt_token_ids"] = list(reply.prompt_ids)
        yield event(first)
        told = _said(reply.message)
        for at, one in enumerate(told.get("tool_calls", ())):
            one["index"] = at
        choice = _delta(told)
        if request.logprobs:
            choice["logprobs"] = _logprobs(reply)
        if request.token_ids:
            choice["token_ids"] = list(reply.token_ids)
        yield event({**head, "choices": [choice]})
        end = {**_delta({}), "finish_reason": _finish(reply)}
        end["policy_versions"] = [list(one) for one in reply.versions]
        yield event({**head, "choices": [end]})
        if request.usage:
            yield event({**head, "choices": [], "usage": usage_of(reply)})
        yield b"data: [DONE]\n\n"

    def refusal(self, status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
        return error_body(status, code, message, param)


def _message(told: Any, path: str) -> Message:
    """A client's message. Keys that are not known pass: clients send back what they got, with all of it."""
    if not isinstance(told, dict):
        raise invalid(f"{path}: {shown(told)} given, expected a message: an object.", path)
    role = told.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{path}.role: {shown(role)} given, expected {', '.join(_ROLES)}.", f"{path}.role")
    for key in ("function_call", "audio"):
        if told.get(key) is not None:
            raise unsupported(f"{path}.{key}: given, and a session takes none.", f"{path}.{key}")
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant" and told.get("tool_calls") is not None:
        calls = _calls(told["tool_calls"], f"{path}.tool_calls")
    answered = member(told, "tool_call_id", path) if role == "tool" else ""
    if role == "tool" and not answered:
        raise invalid(f"{path}.tool_call_id: expected the id of the call.", f"{path}.tool_call_id")
    return Message(
        _ROLES[role],
        text_of(told.get("content"), f"{path}.content"),
        member(told, "reasoning_content", path) if role == "assistant" else "",
        calls,
        answered,
        member(told, "name", path),
    )


def _calls(told: Any, path: str) -> tuple[ToolCall, ...]:
    if not isinstance(told, list) or len(told) > MOST_TOOLS:
        raise invalid(f"{path}: {shown(told)} given, expected a list of calls.", path)
    return tuple(_call(one, f"{path}.{at}") for at, one in enumerate(told))


def _call(told: Any, path: str) -> ToolCall:
    function = told.get("function") if isinstance(told, dict) else None
    if not isinstance(told, dict) or not isinstance(function, dict):
        raise invalid(f"{path}: {shown(told)} given, expected a call with its function.", path)
    call_id, name = member(told, "id", path), member(function, "name", f"{path}.function")
    if not call_id or not name:
        raise invalid(f"{path}: expected a call with an id and a function's name.", path)
    return ToolCall(call_id, name, member(function, "arguments", f"{path}.function"))


def _tool(told: Any, path: str) -> Tool:
    body = Body(TOOL, told, path)
    kind, function = body.any("type"), Body(FUNCTION, body.any("function"), f"{path}.function")
    body.end()
    if kind != "function":
        raise body.wrong("type", kind, "function: other tools are nobody's here")
    return tool_of(function, function.any("parameters"))


def _head(reply: FinishedTurn, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _said(message: Message) -> dict[str, Any]:
    """What the message has, of an answer's `message` and of a stream's `delta`."""
    said: dict[str, Any] = {}
    if message.content or not message.tool_calls:
        said["content"] = message.content
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in message.tool_calls
        ]
    return said


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish(reply: FinishedTurn) -> str:
    """An agent's loop goes on only where the reason is `tool_calls`."""
    return "tool_calls" if reply.message.tool_calls and reply.finish == "stop" else reply.finish


def _logprobs(reply: FinishedTurn) -> dict[str, Any]:
    return {"content": token_logprobs(reply), "refusal": None}
