"""Recognising what comes back: a client sends the whole conversation with each request, and the turn that it goes on
from is found in it.

An assistant's message is known by its tool-call ids, which Gyre minted, and by what it said: clients drop what was
reasoned, names and keys they do not know, strip blanks, and write a call's arguments anew. Those who change more have
edited the conversation, and begin a branch.

This module must not know of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gyre.chat.messages import Message, ToolCall

ROOT = -1
"""The parent of a turn that goes on from no other."""

GOES_ON = ""
"""From a leaf, from nothing, or by an opening that the session has not seen."""
BRANCH = "branch"
"""Another answer to what was asked before, or another message after it: the turn has children."""
CLIENT_EDIT = "client edit"
"""A message that is in the session came back otherwise."""
TRUNCATION = "truncation"
"""Messages that are in the session were left out, and no other one changed."""
CAUSES = (BRANCH, CLIENT_EDIT, TRUNCATION)
"""Why a request begins a branch, as far as its messages say."""


@dataclass(slots=True)
class TurnHistory:
    """A turn, by number: its `parent`'s number or ROOT, the messages that it added to its parent's, and what it
    answered, with Gyre's tool-call ids."""

    parent: int
    messages: tuple[Message, ...]
    reply: Message


@dataclass(frozen=True, slots=True)
class Located:
    """The turn that a request goes on from, or ROOT; the messages that are new after it; and why a branch begins there,
    one of CAUSES, or GOES_ON."""

    parent: int
    new: tuple[Message, ...]
    cause: str


def locate(turns: Sequence[TurnHistory], messages: Sequence[Message]) -> Located:
    """Where the messages of a request stand in a session's turns, of which each stands after its parent. It goes on
    from the deepest turn whose conversation begins the request's, the newest of several; from ROOT, with all messages,
    where the client put an assistant's message after it that no turn answered."""
    told = tuple(messages)
    parent = ROOT
    ends = _ends(turns, told)
    for number, end in enumerate(ends):
        if 0 <= end < len(told) and end >= (ends[parent] if parent != ROOT else 0):
            parent = number
    new = told[ends[parent] :] if parent != ROOT else told
    if parent != ROOT and not any(one.role == "assistant" for one in new):
        is_inner = any(turn.parent == parent for turn in turns)
        return Located(parent, new, BRANCH if is_inner else GOES_ON)
    return Located(ROOT, told, _cause(turns, told))


def call_id(turn: int, index: int, salt: str) -> str:
    """The id of call number `index` of a turn; `salt` is the session's id. The same each time."""
    digest = hashlib.blake2b(f"{turn}/{index}/{salt}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


def is_same(known: Message, told: Message) -> bool:
    """Whether a client's message is one that the session has."""
    if known.role != told.role:
        return False
    if known.role != "assistant":
        return known.content == told.content and known.tool_call_id == told.tool_call_id
    return (
        known.content.strip() == told.content.strip()
        and len(known.tool_calls) == len(told.tool_calls)
        and all(map(_is_same_call, known.tool_calls, told.tool_calls))
    )


def _is_same_call(known: ToolCall, told: ToolCall) -> bool:
    if (known.id, known.name) != (told.id, told.name):
        return False
    return known.arguments == told.arguments or _value(known.arguments) == _value(told.arguments)


def _value(arguments: str) -> Any:
    """The JSON value of a text, of which none is an empty object; the text itself where it is no JSON."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # what a model writes is often no JSON
        return arguments


def _ends(turns: Sequence[TurnHistory], messages: tuple[Message, ...]) -> list[int]:
    """Of each turn, at which message of the request its conversation ends; -1 where the request does not begin with
    it."""
    ends: list[int] = []
    for turn in turns:
        start = 0 if turn.parent == ROOT else ends[turn.parent]
        own = (*turn.messages, turn.reply)
        found = messages[start : start + len(own)] if start >= 0 else ()
        is_there = len(found) == len(own) and all(map(is_same, own, found))
        ends.append(start + len(own) if is_there else -1)
    return ends


def _cause(turns: Sequence[TurnHistory], messages: tuple[Message, ...]) -> str:
    """Why a request whose conversation goes on from no turn begins anew."""
    roots = [turn.messages for turn in turns if turn.parent == ROOT]
    if any(len(own) == len(messages) and all(map(is_same, own, messages)) for own in roots):
        return BRANCH
    known = [one for turn in turns for one in (*turn.messages, turn.reply)]
    if not any(is_same(one, told) for one in known for told in messages if told.role != "system"):
        return GOES_ON
    if any(_leaves_out(path, messages) for path in _paths(turns)):
        return TRUNCATION
    return CLIENT_EDIT


def _paths(turns: Sequence[TurnHistory]) -> Iterator[list[Message]]:
    """The conversations of the leaves."""
    inner = {turn.parent for turn in turns}
    for number in range(len(turns)):
        if number in inner:
            continue
        path: list[Message] = []
        at = number
        while at != ROOT:
            path[:0] = (*turns[at].messages, turns[at].reply)
            at = turns[at].parent
        yield path


def _leaves_out(path: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether the messages begin as the path does, go on with others of it in its order, and are new after that."""
    rest = iter(path)
    count = 0
    while count < len(messages) and any(is_same(one, messages[count]) for one in rest):
        count += 1
    begins = count > 0 and is_same(path[0], messages[0])
    return begins and not any(one.role == "assistant" for one in messages[count:])
