"""What conversations have in every dialect: contents that are text, nothing, or a list of parts that are text; tools;
and somebody else than the assistant who speaks last.

This module must not know of any dialect.
"""

from __future__ import annotations

from typing import Any

from gyre.chat.dialects.dialect import MOST_PARTS, unsupported
from gyre.chat.dialects.keys import invalid
from gyre.chat.messages import Message, Tool
from gyre.request_body import Body, shown

_TEXT = ("text", "input_text", "output_text")
"""Types of parts whose `text` is text."""


def text_of(content: Any, path: str) -> str:
    """The text; that of parts is joined as it is. Raises ChatRefused for what is no text, media too."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MOST_PARTS:
        raise invalid(
            f"{path}: {shown(content)} given, expected text or a list of at most {MOST_PARTS} parts.", path
        )
    return "".join(_part(one, f"{path}.{at}") for at, one in enumerate(content))


def member(told: dict[str, Any], key: str, path: str) -> str:
    """The text of a key of a message or a part; "" for none."""
    value = told.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}.{key}: {shown(value)} given, expected text.", f"{path}.{key}")
    return value or ""


def tool_of(body: Body, parameters: Any, key: str = "parameters") -> Tool:
    """Of a table that takes name and description; `parameters` is what its `key` has."""
    name, description = body.text("name"), body.text("description")
    body.end()
    if not name:
        raise body.wrong("name", name, "the tool's name")
    if parameters is not None and not isinstance(parameters, dict):
        raise body.wrong(key, parameters, "a JSON schema: an object")
    return Tool(name, description or "", parameters or {})


def checked_messages(messages: tuple[Message, ...], key: str = "messages") -> tuple[Message, ...]:
    """Raises ChatRefused unless somebody but the assistant speaks last."""
    if not messages:
        raise invalid(f"{key}: expected at least one message.", key)
    if messages[-1].role == "assistant":
        raise unsupported(
            f"{key}: the last one is the assistant's, and an answer goes on from none of a client's words.",
            key,
            "End with a message of the user or a tool.",
        )
    return messages


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(f"{path}: {shown(part)} given, expected a part: an object.", path)
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind not in _TEXT:
        raise unsupported(
            f"{path}: a part of type {shown(kind)} given, and conversations are text.",
            path,
            "Send text parts.",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text: {shown(text)} given, expected text.", f"{path}.text")
    return text
