"""The content of a message: a text, nothing, or a list of parts that are text.

This module must not know who said it.
"""

from __future__ import annotations

from typing import Any

from gyre.chat.dialects.dialect import MOST_PARTS, unsupported
from gyre.chat.dialects.keys import invalid
from gyre.request_body import shown

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
