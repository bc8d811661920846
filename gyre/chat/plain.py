"""Conversations for models with a tokenizer of characters: a frame of a few characters, which a model of twenty of them
can learn.

    37*58-9=          what the user says, as it is
    [37*58]           the assistant calls: what it drew ends with the close
    :2146:            what the tool answered
    2137<eos>         the assistant answers

With one tool, what stands in a call is the value of its first parameter. With several, the tool's name stands before
it.

Invariants:
- *foreign text is text*: characters of the frame, and those that are in no alphabet, are replaced in what users, tools
  and clients say; a special token is no character;
- *rendered is bridged*: a conversation whose turns the model ended by itself is rendered as it was drawn.

This module must not know which task a model learns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from gyre.chat.messages import Message, Tool, ToolCall
from gyre.errors import ConfigError


class CharacterTokenizer(Protocol):
    """One token a character, after special tokens that are none. Character `i` of the alphabet has an id of its own."""

    bos_id: int
    eos_id: int
    alphabet: str

    def encode(self, text: str) -> Any:
        """Ids `[len(text)]`, without specials."""
        ...


@dataclass(frozen=True, slots=True)
class PlainFrame:
    """The characters between which a call stands, the one before and after what a message brings later in the
    conversation, and what stands for a character that may not: "" leaves it out."""

    call: str = "["
    end: str = "]"
    result: str = ":"
    replacement: str = ""


class PlainRenderer:
    """Of a tokenizer whose alphabet has the frame's characters. Raises ConfigError where it has not."""

    def __init__(self, tokenizer: CharacterTokenizer, frame: PlainFrame | None = None) -> None:
        self._frame = frame = frame or PlainFrame()
        _check(frame, tokenizer.alphabet)
        ids = [int(one) for one in tokenizer.encode(tokenizer.alphabet)]
        self._ids = dict(zip(tokenizer.alphabet, ids, strict=True))
        self._characters = {token: character for character, token in self._ids.items()}
        self._bos, self._eos = int(tokenizer.bos_id), int(tokenizer.eos_id)
        self._own = frozenset((frame.call, frame.end, frame.result))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token, and the close of a call."""
        return self._eos, self._ids[self._frame.end]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """int `[p]`: the begin token, and the messages."""
        ids = [self._bos]
        is_answered = False
        for message in messages:
            is_answered = is_answered or message.role in ("assistant", "tool")
            ids += self._message(message, tools, is_framed=is_answered)
        return ids

    def bridge(
        self,
        prompt_ids: Sequence[int],
        drawn_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """int `[a]`: the end token where the last turn drew none, then the messages. None where one of them is the
        assistant's."""
        if any(one.role == "assistant" for one in messages):
            return None
        is_open = not len(drawn_ids) or int(drawn_ids[-1]) not in self.stop_token_ids
        ids = [self._eos] if is_open else []
        for message in messages:
            ids += self._message(message, tools, is_framed=True)
        return ids

    def parse(self, prompt_ids: Sequence[int], drawn_ids: Sequence[int], tools: Sequence[Tool]) -> Message:
        """A call where the drawn text ends with one, and its tool is among `tools`; else the text is all content."""
        frame = self._frame
        drawn = [int(one) for one in drawn_ids]
        text = self._text(drawn)
        before, opened, inner = text.partition(frame.call)
        if opened and drawn[-1] == self._ids[frame.end] and inner.count(frame.end) == 1:
            call = _call_of(inner[:-1], tools)
            if call is not None:
                return Message("assistant", before, tool_calls=(call,))
        return Message("assistant", text)

    def written(self, ids: Sequence[int]) -> list[str]:
        """The character of each token; of one that has none its number."""
        return [self._characters.get(int(one), f"<{int(one)}>") for one in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._characters.get(int(one), "") for one in ids]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces(ids))

    def _message(self, message: Message, tools: Sequence[Tool], *, is_framed: bool) -> list[int]:
        frame = self._frame
        if message.role != "assistant":
            text = self._clean(message.content)
            return self._encoded(f"{frame.result}{text}{frame.result}" if is_framed else text)
        if not message.tool_calls:
            return [*self._encoded(self._clean(message.content)), self._eos]
        calls = "".join(
            f"{frame.call}{self._clean(_written(one, tools))}{frame.end}" for one in message.tool_calls
        )
        return self._encoded(self._clean(message.content) + calls)

    def _clean(self, text: str) -> str:
        """The text in which no character is of the frame, or of none."""
        return "".join(
            one if one in self._ids and one not in self._own else self._frame.replacement for one in text
        )

    def _encoded(self, text: str) -> list[int]:
        return [self._ids[one] for one in text]

    def _text(self, ids: Iterable[int]) -> str:
        """The text up to the first end token; ids that are no character are left out."""
        text = []
        for one in ids:
            if one == self._eos:
                break
            text.append(self._characters.get(one, ""))
        return "".join(text)


def _check(frame: PlainFrame, alphabet: str) -> None:
    own = (frame.call, frame.end, frame.result)
    for one in own:
        if len(one) != 1 or one not in alphabet:
            raise ConfigError(
                f"The frame's {one!r} is no character of the alphabet {alphabet!r}.",
                hint="Give the alphabet the characters of the frame, or another frame.",
            )
    if len({*own}) < len(own):
        raise ConfigError(f"The frame {''.join(own)!r} has a character twice.")
    if frame.replacement and (len(frame.replacement) > 1 or frame.replacement not in set(alphabet) - {*own}):
        raise ConfigError(f"The replacement {frame.replacement!r} is no character that a text may have.")


def _call_of(inner: str, tools: Sequence[Tool]) -> ToolCall | None:
    """The call that the text between open and close makes, None where no tool has its name."""
    named = tools[0] if len(tools) == 1 else None
    value = inner
    if named is None:
        fitting = [one for one in tools if inner.startswith(one.name)]
        if not fitting:
            return None
        named = max(fitting, key=lambda one: len(one.name))
        value = inner.removeprefix(named.name)
    return ToolCall("", named.name, json.dumps({_parameter(named): value}, ensure_ascii=False))


def _written(call: ToolCall, tools: Sequence[Tool]) -> str:
    """The text between open and close: the value of the first parameter, or the arguments as they are."""
    try:
        told = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # a client may send what it likes
        told = None
    values = list(told.values()) if isinstance(told, dict) else []
    value = values[0] if len(values) == 1 else call.arguments
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(tools) <= 1 else call.name + text


def _parameter(tool: Tool) -> str:
    """The name of the tool's first parameter, `input` where its schema names none."""
    properties = tool.parameters.get("properties")
    return next(iter(properties), "input") if isinstance(properties, dict) else "input"
