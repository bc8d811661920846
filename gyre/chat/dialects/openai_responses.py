"""OpenAI's `/v1/responses`: a request has its whole conversation, or what comes after an earlier answer of its session.

An assistant's message is several items here: what it thought, what it said, and each of its calls.

This module must not know of other dialects, or of sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gyre.chat.dialects.content import checked_messages, member, text_of, tool_of
from gyre.chat.dialects.dialect import (
    MOST_MESSAGES,
    MOST_TOOLS,
    checked_choice,
    event,
    longest,
    stopping,
    token_logprobs,
    unsupported,
)
from gyre.chat.dialects.keys import RESPONSES, RESPONSES_TOOL, decoded, invalid
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.request_body import Body, drawing, error_body, shown

LOGPROBS = "message.output_text.logprobs"
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


class OpenaiResponses:
    path = "/v1/responses"

    def read(self, body: bytes) -> ChatRequest:
        told = Body(RESPONSES, decoded(body))
        instructions = told.text("instructions")
        messages = [Message("system", instructions)] if instructions else []
        messages += _conversation(told.any("input"))
        tools = tuple(
            _tool(one, f"tools.{at}") for at, one in enumerate(told.listed("tools", MOST_TOOLS, "tools"))
        )
        sampling = drawing(told) | stopping(told) | longest(told, "max_output_tokens")
        request = ChatRequest(
            checked_messages(tuple(messages), "input"),
            tools,
            sampling,
            told.flag("stream"),
            told.text("model") or "",
            LOGPROBS in told.listed("include", MOST_TOOLS, "words"),
            calls_are_read=checked_choice(told.any("tool_choice")),
            parallel_tool_calls=told.flag("parallel_tool_calls", True),
            after=told.text("previous_response_id") or "",
            is_instructed=bool(instructions),
            is_stored=told.flag("store", True),
        )
        told.end()
        return request

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
        is_cut = reply.finish == "length"
        return {
            **_head(request, reply),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(request, reply),
            "usage": _usage(reply),
            "policy_versions": [list(one) for one in reply.versions],
        }

    def events(self, request: ChatRequest, reply: FinishedTurn) -> Iterator[bytes]:
        whole = self.answer(request, reply)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        told: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for at, item in enumerate(whole["output"]):
            told += _item_events(item, at)
        told.append({"type": f"response.{whole['status']}", "response": whole})
        for number, one in enumerate(told):
            yield event({**one, "sequence_number": number}, one["type"])

    def refusal(self, status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
        return error_body(status, code, message, param)


def _conversation(told: Any) -> list[Message]:
    if isinstance(told, str):
        return [Message("user", told)]
    if not isinstance(told, list) or len(told) > MOST_MESSAGES:
        raise invalid(
            f"input: {shown(told)} given, expected text or a list of at most {MOST_MESSAGES} items.", "input"
        )
    made: list[Message] = []
    own: list[Message] = []
    for at, one in enumerate(told):
        message = _item(one, f"input.{at}")
        if message.role == "assistant":
            own.append(message)
            continue
        made += _joined(own)
        own = []
        made.append(message)
    return made + _joined(own)


def _joined(items: Sequence[Message]) -> list[Message]:
    """The assistant's message of its items."""
    if not items:
        return []
    return [
        Message(
            "assistant",
            "".join(one.content for one in items),
            "".join(one.reasoning for one in items),
            tuple(call for one in items for call in one.tool_calls),
        )
    ]


def _item(told: Any, path: str) -> Message:
    if not isinstance(told, dict):
        raise invalid(f"{path}: {shown(told)} given, expected an item: an object.", path)
    kind = told.get("type", "message")
    if kind == "message":
        role = told.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"{path}.role: {shown(role)} given, expected {', '.join(_ROLES)}.", f"{path}.role")
        return Message(_ROLES[role], text_of(told.get("content"), f"{path}.content"))
    if kind == "function_call":
        call_id, name = member(told, "call_id", path), member(told, "name", path)
        if not call_id or not name:
            raise invalid(f"{path}: expected a call with call_id and name.", path)
        return Message("assistant", tool_calls=(ToolCall(call_id, name, member(told, "arguments", path)),))
    if kind == "function_call_output":
        call_id = member(told, "call_id", path)
        if not call_id:
            raise invalid(f"{path}.call_id: expected the id of the call.", f"{path}.call_id")
        return Message("tool", text_of(told.get("output"), f"{path}.output"), tool_call_id=call_id)
    if kind == "reasoning":  # it is passed over where history is recognised
        return Message("assistant", reasoning=_reasoning(told.get("content"), f"{path}.content"))
    raise unsupported(
        f"{path}.type: {shown(kind)} given, expected message, function_call, function_call_output or reasoning.",
        f"{path}.type",
        "Send each item whole; tools are run by the agent.",
    )


def _reasoning(content: Any, path: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise invalid(f"{path}: {shown(content)} given, expected a list of parts.", path)
    return "".join(member(one, "text", f"{path}.{at}") for at, one in enumerate(content))


def _tool(told: Any, path: str) -> Tool:
    body = Body(RESPONSES_TOOL, told, path)
    kind = body.any("type")
    if kind != "function":
        raise body.wrong("type", kind, "function: other tools are nobody's here")
    return tool_of(body, body.any("parameters"))


def _head(request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
    """What a client's types want of every response."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.after or None,
        "store": request.is_stored,
        "temperature": request.sampling.get("temperature"),
        "top_p": request.sampling.get("top_p"),
        "tool_choice": "auto" if request.calls_are_read else "none",
        "tools": [],
    }


def _usage(reply: FinishedTurn) -> dict[str, Any]:
    prompt, drawn = reply.prompt_length, len(reply.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": drawn,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + drawn,
    }


def _items(request: ChatRequest, reply: FinishedTurn) -> list[dict[str, Any]]:
    message = reply.message
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": [thought]})
    if message.content or not message.tool_calls:
        logprobs = token_logprobs(reply) if request.logprobs else []
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": [part]})
    for one in message.tool_calls:
        call = {"call_id": one.id, "name": one.name, "arguments": one.arguments}
        items.append({"type": "function_call", "id": f"fc_{one.id}", **call})
    return [{**one, "status": "incomplete" if reply.finish == "length" else "completed"} for one in items]


def _item_events(item: dict[str, Any], at: int) -> Iterator[dict[str, Any]]:
    kind = item["type"]
    hollow: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    yield _of_item("added", {**item, **hollow, "status": "in_progress"}, at)
    of = {"item_id": item["id"], "output_index": at}
    if kind == "function_call":
        name = "response.function_call_arguments"
        yield {"type": f"{name}.delta", **of, "delta": item["arguments"]}
        yield {"type": f"{name}.done", **of, "name": item["name"], "arguments": item["arguments"]}
    else:
        yield from _part_events(item["content"][0], of)
    yield _of_item("done", item, at)


def _of_item(name: str, item: dict[str, Any], at: int) -> dict[str, Any]:
    return {"type": f"response.output_item.{name}", "output_index": at, "item": item}


def _part_events(part: dict[str, Any], of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of what was thought or said."""
    of = {**of, "content_index": 0}
    name = f"response.{part['type']}"
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {
        "type": "response.content_part.added",
        **of,
        "part": {**part, "text": "", **{key: [] for key in more}},
    }
    yield {"type": f"{name}.delta", **of, "delta": part["text"], **more}
    yield {"type": f"{name}.done", **of, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **of, "part": part}
