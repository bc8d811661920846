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
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.chat.history import BRANCH, CLIENT_EDIT, GOES_ON, Located, TurnHistory, locate
from gyre.chat.messages import Message, Tool
from gyre.chat.renderer import Renderer
from gyre.chat.requests import ChatRequest, said
from gyre.chat.stop_texts import Stop, stop_of
from gyre.request_body import RequestRefused, refused
from gyre.rollouts.plane.requests import InFlightRequest
from gyre.rollouts.plane.session_tree import ROOT, LedgerSession, LedgerTurn


class _Note(msgspec.Struct, array_like=True):
    """What a turn was asked with: its new messages, the tools of its request, and how calls are read."""

    messages: list[Message] = []
    tools: list[Tool] = []
    calls_are_read: bool = True
    parallel_tool_calls: bool = True
    is_instructed: bool = False
    is_stored: bool = True


TEMPLATE = "template"
"""Why a turn begins anew whose messages go on from one that is there: the model's format cannot go on from it."""

_note = msgspec.msgpack.Decoder(_Note).decode


class Conversations:
    """`renderer` is None where prompts are token ids alone."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer
        self._told: WeakKeyDictionary[InFlightRequest, Message] = WeakKeyDictionary()
        """What turns that are whole answered, by their requests: each request that goes on from one has it again."""

    async def prompt_of(
        self, session: LedgerSession, asked: ChatRequest, before: LedgerTurn | None = None
    ) -> tuple[int, NDArray[np.int32], bytes, str]:
        """The turn's parent, its prompt int32 `[p]`, its note, and why it begins a branch, "" where it begins none.
        `before` is the turn with the answer that `asked` goes on from by its id, None where there is none. Raises
        RequestRefused."""
        if self._renderer is None:
            raise _without_format("messages cannot be put into tokens")
        try:
            return await asyncio.to_thread(self._prompt, self._renderer, session, asked, before)
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
        self,
        renderer: Renderer,
        session: LedgerSession,
        asked: ChatRequest,
        before_it: LedgerTurn | None = None,
    ) -> tuple[int, NDArray[np.int32], bytes, str]:
        turns = list(session.turns)  # a session that is open loses none, so their places are their numbers
        histories = [self._history(session, turn) for turn in turns]
        messages, found = self._located(turns, histories, asked, before_it)
        parent, new, prompt, why = ROOT, messages, None, found.cause
        if found.parent != ROOT and turns[found.parent].sample.finish:
            before = turns[found.parent]
            if self._has_other_tools(renderer, turns, before, asked):
                why = CLIENT_EDIT
            else:
                ids, drawn = before.prompt_ids, before.sample.token_ids()
                added = renderer.bridge(ids.tolist(), drawn.tolist(), found.new, asked.tools)
                if added is None:
                    why = TEMPLATE
                else:
                    parent, new = before.number, found.new
                    prompt = np.concatenate([ids, drawn, np.array(added, np.int32)])
        if prompt is None:
            prompt = np.array(renderer.render(new, asked.tools), np.int32)
        note = _Note(
            list(new),
            list(asked.tools),
            asked.calls_are_read,
            asked.parallel_tool_calls,
            asked.is_instructed and parent == ROOT,
            asked.is_stored,
        )
        return parent, prompt, msgspec.msgpack.encode(note), why

    def _located(
        self,
        turns: Sequence[LedgerTurn],
        histories: Sequence[TurnHistory],
        asked: ChatRequest,
        before: LedgerTurn | None,
    ) -> tuple[tuple[Message, ...], Located]:
        """The whole conversation, and where it goes on. After an answer that is named by its id it does so there,
        unless the first message of before, which was of that request alone, is another one now."""
        if before is None:
            return asked.messages, locate(histories, asked.messages)
        if not before.note or not before.sample.finish or not _note(before.note).is_stored:
            raise unknown_answer(asked.after)
        said: tuple[Message, ...] = ()
        at = before.number
        while at != ROOT:
            said, first = (*histories[at].messages, histories[at].reply, *said), turns[at]
            at = first.parent
        own = 1 if _note(first.note).is_instructed else 0
        new = asked.messages[1:] if asked.is_instructed else asked.messages
        if said[:own] == asked.messages[: len(asked.messages) - len(new)]:
            is_inner = any(turn.parent == before.number for turn in turns)
            return (*said, *new), Located(before.number, new, BRANCH if is_inner else GOES_ON)
        whole = (*asked.messages[: len(asked.messages) - len(new)], *said[own:], *new)
        return whole, locate(histories, whole)

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
        """The end tokens of the model's chat format, beside those that are asked for. Raises RequestRefused for texts
        that end an answer, where tokens have none."""
        if self._renderer is None:
            if sampling.get("stop"):
                raise _without_format("texts cannot end an answer")
            return {}
        own = sampling.get("stop_token_ids") or ()
        return {"stop_token_ids": sorted({*own, *self._renderer.stop_token_ids})}

    def message_of(self, session: LedgerSession, turn: LedgerTurn) -> Message:
        """What the turn answered, its tool calls with ids of our own."""
        if self._renderer is None:
            return Message("assistant")
        told = self._told.get(turn.request)
        if told is None:
            is_whole = bool(turn.sample.finish)  # it may become so while it is read
            told = self._read(self._renderer, session, turn)
            if is_whole:
                self._told[turn.request] = told
        return told

    def _read(self, renderer: Renderer, session: LedgerSession, turn: LedgerTurn) -> Message:
        note = _note(turn.note) if turn.note else _Note()
        ids = turn.sample.token_ids().tolist()
        added = turn.request.added.tolist()
        parsed, text = renderer.parse(added, ids, note.tools), renderer.text(ids)
        if (stop := self.stop_of(turn)) is not None:
            text = text.partition(stop.text)[0]
            parsed = self._until(stop, parsed, added, ids, note.tools)
        asked = ChatRequest(
            tools=tuple(note.tools),
            calls_are_read=note.calls_are_read,
            parallel_tool_calls=note.parallel_tool_calls,
        )
        return said(parsed, asked, text, 0, f"{session.id}/{turn.key}")

    def stop_of(self, turn: LedgerTurn) -> Stop | None:
        """The text that ended the turn; None where none did."""
        texts = turn.request.sampling.get("stop")
        if self._renderer is None or not texts:
            return None
        return stop_of(turn.sample.token_ids().tolist(), texts, self._renderer)

    def _until(
        self, stop: Stop, parsed: Message, added: list[int], ids: list[int], tools: Sequence[Tool]
    ) -> Message:
        """The message up to the text that ended it. Where that is in none of its texts, it is in the frame between
        them, and the tokens before it are read."""
        assert self._renderer is not None
        if stop.text in parsed.reasoning:
            return Message("assistant", "", parsed.reasoning.partition(stop.text)[0])
        if stop.text in parsed.content:
            return replace(parsed, content=parsed.content.partition(stop.text)[0])
        return self._renderer.parse(added, ids[: stop.before], tools)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        if self._renderer is None:
            return [f"token_id:{one}" for one in ids]
        return self._renderer.written(ids)

    def _history(self, session: LedgerSession, turn: LedgerTurn) -> TurnHistory:
        note = _note(turn.note) if turn.note else _Note()
        return TurnHistory(turn.parent, tuple(note.messages), self.message_of(session, turn))


def _without_format(why: str) -> RequestRefused:
    return refused(
        422,
        "no_renderer",
        f"This job's model has no chat format, so {why}.",
        "Ask with token ids, or give config.chat.",
    )


def unknown_answer(name: str) -> RequestRefused:
    """In OpenAI's words."""
    return refused(
        400,
        "previous_response_not_found",
        f"Previous response with id {name[:200]!r} not found: it is none of this session's, or was not stored.",
        "Send the whole conversation.",
        param="previous_response_id",
    )
