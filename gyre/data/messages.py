"""Conversations: the messages that a cell of a data set holds, as a chat template takes them.

Invariant *all or nothing*: what a prompt is asked with is in its text. Pictures, sounds and calls of tools, which this
form has no place for, are refused, as is a conversation that asks nothing; nothing of a message is dropped in silence.

This module must not know of templates, tokens or files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gyre.data.values import Unholdable, holds_nothing, plain

Messages = list[dict[str, Any]]

MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "an image"),
    **dict.fromkeys(("video", "videos", "video_url"), "a video"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
}
"""What a column, a key of a message or the type of a part holds, by its name."""
_TOOLS = {"tool_calls": "a call of a tool", "function_call": "a call of a tool", "tools": "tools"}
_TEXT = ("text", "input_text", "output_text")
_SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Roles of the layout whose messages have `from` and `value`."""


class Unsupported(Exception):
    """A row that cannot become a prompt. `reason` is what rows are counted by; `sentence` describes this one."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


def messages_of(prompt: Any) -> Messages:
    """The messages of a prompt, which is a text or a list of messages. A text is the user's; parts that are text are
    joined. Raises Unsupported, and Unholdable for half a character."""
    if isinstance(prompt, str):
        return _written_out(prompt) or [{"role": "user", "content": _not_blank(plain(prompt))}]
    if not isinstance(prompt, list | tuple):
        if holds_nothing(prompt):
            raise Unsupported("no prompt", f"the prompt is {prompt!r:.40}")
        raise Unsupported(
            "no text",
            f"a prompt is {prompt!r:.200}, neither text nor a list of messages with role and content",
        )
    if not prompt:
        raise Unsupported("no messages", "the prompt has no messages")
    return [_message(one, f"message {number}") for number, one in enumerate(prompt, start=1)]


def refuse_columns(row: Mapping[str, Any], dropped: frozenset[str]) -> None:
    """Raises Unsupported if a row has pictures, sounds or tools in columns beside the prompt."""
    for column, value in row.items():
        if column in dropped or holds_nothing(value):
            continue
        if column in MEDIA:
            raise Unsupported(MEDIA[column], f"column {column}: the row has {MEDIA[column]}")
        if column == "tools" and isinstance(value, list) and isinstance(value[0], Mapping):
            raise Unsupported("tools", "column tools: the row has tools")


def without_last_answer(messages: Messages) -> tuple[Messages, str | None]:
    """The messages up to the assistant's last turn, if the conversation ends with it, and the text of that turn. Raises
    Unsupported if nothing is left."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise Unsupported("no question", "every message is the assistant's, so nothing is asked")
    if not messages[end - 1]["content"].strip():
        raise Unsupported("an empty prompt", f"message {end}, which asks, is empty")
    said = [one["content"] for one in messages[end:]]
    return messages[:end], "\n".join(said) if said else None


def _message(one: Any, where: str) -> dict[str, Any]:
    if not isinstance(one, Mapping):
        raise Unsupported("no text", f"{where} is {one!r:.100}, not a mapping with role and content")
    if "role" not in one and {"from", "value"} <= one.keys():
        speaker = one["from"]
        one = {"role": _SPEAKERS.get(speaker, speaker), "content": one["value"]}
    role = one.get("role")
    if not isinstance(role, str) or not role:
        raise Unsupported("no role", f"{where} has the role {role!r:.40}, expected a text such as 'user'")
    for key, what in {**MEDIA, **_TOOLS}.items():
        if not holds_nothing(one.get(key)):
            raise Unsupported(what, f"{where} holds {what}")
    content = _content(one.get("content"), where)
    # A key that only other messages of the file have is null in Parquet. Transformers leaves such keys out, too.
    others = {
        key: value
        for key, value in one.items()
        if key not in ("role", "content", *MEDIA, *_TOOLS) and value is not None
    }
    try:
        return {"role": plain(role), "content": plain(content), **plain(others)}
    except Unholdable as error:
        raise Unholdable(f"in {where} {error}") from None


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if holds_nothing(content) and not isinstance(content, list):
        raise Unsupported("no content", f"{where} has no content")
    if not isinstance(content, list):
        raise Unsupported(
            "no text", f"{where} has the content {content!r:.100}, neither text nor a list of parts"
        )
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type") or "text"
        for key in (kind, *part):
            if key in MEDIA and (key == kind or not holds_nothing(part[key])):
                raise Unsupported(MEDIA[key], f"{where} holds {MEDIA[key]}")
        if kind in _TEXT and isinstance(part.get("text"), str):
            text: str = part["text"]
            return text
    raise Unsupported("no text", f"{where} has the part {part!r:.100}, which is no text")


def _written_out(text: str) -> Messages | None:
    """The messages of a text that is a list of them as JSON, as columns of CSV files are; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith(("[{'role'", "[{'content'", "[{'from'")):
            raise Unsupported(
                "no text",
                f"the prompt is {text!r:.60}, Python's form of a list of messages; write it as JSON",
            ) from None
        return None
    if not (
        isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found)
    ):
        return None
    return [_message(one, f"message {number}") for number, one in enumerate(found, start=1)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise Unsupported("an empty prompt", "the prompt is empty")
    return text
