"""What the messages of a session's turns are in tokens: a turn's history is found among the turns that are there, and
only what is new is put into tokens.

Invariants:
- *never encoded again*: what an engine drew, and what stood before it, is taken as it is;
- *a function of the ledger*: what a turn answered is read from its tokens each time, so a new manager answers the same.

This module must not know about sockets, or when a turn is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.chat.history import CLIENT_EDIT, TurnHistory, locate
from gyre.chat.messages import Message, Tool
from gyre.chat.renderer import Renderer
from gyre.chat.requests import ChatRequest, said
from gyre.request_body import RequestRefused, refused
from gyre.rollouts.plane.session_tree import ROOT, LedgerSession, LedgerTurn


class _Note(msgspec.Struct, array_like=True):
    """What a turn was asked with: its new messages, the tools of its request, and how calls are read."""

    messages: list[Message] = []
    tools: list[Tool] = []
    calls_are_read: bool = True
    parallel_tool_calls: bool = True


TEMPLATE = "template"
"""Why a turn begins anew whose messages go on from one that is there: the model's format cannot go on from it."""

_note = msgspec.msgpack.Decoder(_Note).decode


class Conversations:
    """`renderer` is None where prompts are token ids alone."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer

    async def prompt_of(
        self, session: LedgerSession, asked: ChatRequest
    ) -> tuple[int, NDArray[np.int32], bytes, str]:
        """The turn's parent, its prompt int32 `[p]`, its note, and why it begins a branch, "" where it begins none.
        Raises RequestRefused."""
        if self._renderer is None:
            raise refused(
                422,
                "no_renderer",
                "This job's model has no chat format, so messages cannot be put into tokens.",
                "Ask with token ids, or give config.chat.",
            )
        try:
            return await asyncio.to_thread(self._prompt, self._renderer, session, asked)
        except RequestRefused:
            raise
        except (
            Exception
        ) as error:  # a model's template may raise anything of messages that it was not written for
            raise refused(
                422,
                "chat",
                f"The model's chat format does not take these messages: {type(error).__name__}: {error!s:.500}",
                "Change the messages.",
            ) from error

    def _prompt(
        self, renderer: Renderer, session: LedgerSession, asked: ChatRequest
    ) -> tuple[int, NDArray[np.int32], bytes, str]:
        turns = list(session.turns)  # a session that is open loses none, so their places are their numbers
        found = locate([self._history(session, turn) for turn in turns], asked.messages)
        parent, new, prompt, why = ROOT, tuple(asked.messages), None, found.cause
        if found.parent != ROOT and turns[found.parent].sample.finish:
            before = turns[found.parent]
            if self._has_other_tools(renderer, turns, before, asked):
                why = CLIENT_EDIT
            else:
                ids, drawn = before.prompt_ids, before.sample.tokens()[0]
                added = renderer.bridge(ids.tolist(), drawn.tolist(), found.new, asked.tools)
                if added is None:
                    why = TEMPLATE
                else:
                    parent, new = before.number, found.new
                    prompt = np.concatenate([ids, drawn, np.array(added, np.int32)])
        if prompt is None:
            prompt = np.array(renderer.render(new, asked.tools), np.int32)
        note = _Note(list(new), list(asked.tools), asked.calls_are_read, asked.parallel_tool_calls)
        return parent, prompt, msgspec.msgpack.encode(note), why

    def _has_other_tools(
        self, renderer: Renderer, turns: Sequence[LedgerTurn], turn: LedgerTurn, asked: ChatRequest
    ) -> bool:
        """Whether the turn's path begins otherwise than it would with the request's tools, of which a model's format
        tells there."""
        while turn.parent != ROOT:
            turn = turns[turn.parent]
        note = _note(turn.note) if turn.note else _Note()
        if note.tools == list(asked.tools):
            return False
        begins: list[int] = turn.prompt_ids.tolist()
        return renderer.render(note.messages, asked.tools) != begins

    def stops(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The end tokens of the model's chat format, beside those that are asked for."""
        if self._renderer is None:
            return {}
        own = sampling.get("stop_token_ids") or ()
        return {"stop_token_ids": sorted({*own, *self._renderer.stop_token_ids})}

    def message_of(self, session: LedgerSession, turn: LedgerTurn) -> Message:
        """What the turn answered, its tool calls with ids of our own."""
        if self._renderer is None:
            return Message("assistant")
        note = _note(turn.note) if turn.note else _Note()
        ids = turn.sample.tokens()[0].tolist()
        parsed = self._renderer.parse(turn.request.added.tolist(), ids, note.tools)
        asked = ChatRequest(
            tools=tuple(note.tools),
            calls_are_read=note.calls_are_read,
            parallel_tool_calls=note.parallel_tool_calls,
        )
        return said(parsed, asked, "".join(self.texts(ids)), 0, f"{session.id}/{turn.key}")

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        if self._renderer is None:
            return [f"token_id:{one}" for one in ids]
        return self._renderer.written(ids)

    def _history(self, session: LedgerSession, turn: LedgerTurn) -> TurnHistory:
        note = _note(turn.note) if turn.note else _Note()
        return TurnHistory(turn.parent, tuple(note.messages), self.message_of(session, turn))
