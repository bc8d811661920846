"""What the messages of a session's turns are in tokens: a turn's history is found among the turns that are there, and only
what is new is put into tokens.

Invariants:
- *never encoded again*: what an engine drew, and what stood before it, is taken as it is;
- *a function of the ledger*: what a turn answered is read from its tokens each time, so a new manager answers the same.

This module must not know about sockets, or when a turn is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.chat.dialects import ChatRequest
from gyre.chat.history import TurnHistory, call_id, locate
from gyre.chat.messages import Message, Tool
from gyre.chat.renderer import Renderer
from gyre.rollouts.plane.session_ledger import refused
from gyre.rollouts.plane.session_tree import ROOT, Session, Turn


class _Note(msgspec.Struct, array_like=True):
    """What a turn was asked with: its new messages, and the tools of its request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class Conversations:
    """`renderer` is None where prompts are token ids alone."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer

    async def prompt_of(self, session: Session, asked: ChatRequest) -> tuple[int, NDArray[np.int32], bytes]:
        """The turn's parent, its prompt int32 `[p]` and its note. Raises SessionRefused."""
        if self._renderer is None:
            raise refused(
                422,
                "no_renderer",
                "This job's model has no chat format, so messages cannot be put into tokens.",
                "Ask with token ids, or give config.chat.",
            )
        return await asyncio.to_thread(self._prompt, self._renderer, session, asked)

    def _prompt(
        self, renderer: Renderer, session: Session, asked: ChatRequest
    ) -> tuple[int, NDArray[np.int32], bytes]:
        found = locate(self._histories(session), asked.messages)
        parent, new = found.parent, found.new
        added = None
        if parent != ROOT:
            before = session.turns[parent]
            added = renderer.bridge(before.path().tolist(), before.sample.finish, new, asked.tools)
        if added is None:
            parent, new = ROOT, tuple(asked.messages)
            prompt = np.array(renderer.render(new, asked.tools), np.int32)
        else:
            prompt = np.concatenate([session.turns[parent].path(), np.array(added, np.int32)])
        note = _Note([_out(one) for one in new], [_out(one) for one in asked.tools])
        return parent, prompt, msgspec.msgpack.encode(note)

    def stops(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The end tokens of the model's chat format, beside those that are asked for."""
        if self._renderer is None:
            return {}
        own = sampling.get("stop_token_ids") or ()
        return {"stop_token_ids": sorted({*own, *self._renderer.stop_token_ids})}

    def message_of(self, session: Session, turn: Turn) -> Message:
        """What the turn answered, its tool calls with ids of our own."""
        if self._renderer is None:
            return Message("assistant")
        tools = [Tool(**one) for one in msgspec.msgpack.decode(turn.note, type=_Note).tools] if turn.note else []
        message = self._renderer.parse(turn.sample.tokens()[0].tolist(), tools)
        calls = tuple(
            replace(call, id=call_id(turn.number, at, session.id)) for at, call in enumerate(message.tool_calls)
        )
        return replace(message, tool_calls=calls)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        if self._renderer is None:
            return [f"token_id:{one}" for one in ids]
        return self._renderer.texts(ids)

    def _histories(self, session: Session) -> list[TurnHistory]:
        histories = []
        for turn in session.turns:
            note = msgspec.msgpack.decode(turn.note, type=_Note) if turn.note else _Note([], [])
            messages = tuple(msgspec.convert(one, Message) for one in note.messages)
            histories.append(TurnHistory(turn.parent, messages, self.message_of(session, turn)))
        return histories


def _out(one: Message | Tool) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(one)
    return told
