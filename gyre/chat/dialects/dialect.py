"""What every dialect does: a body becomes a request, a finished turn an answer or the events of a stream.

Invariant *the same bytes again*: an answer is a function of the request's body and of the turn that the ledger has.

This module must not know of sockets, or where a turn comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from gyre.chat.dialects.keys import STREAM_OPTIONS
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.chat.token_text import REPLACEMENT
from gyre.request_body import MOST_NEW_TOKENS, Body, RequestRefused, refused, shown

MOST_MESSAGES = 4096
"""Of one request: more than any budget of turns asks for."""
MOST_TOOLS = 512
MOST_PARTS = 4096
"""Of one message's content."""
MOST_STOP_TEXTS, STOP_CHARS = 16, 256
"""Texts that end an answer, of one request, and their lengths: each is looked for whenever tokens come."""

encode = msgspec.json.Encoder().encode


class Dialect(Protocol):
    @property
    def path(self) -> str:
        """The route, below a session's own or at the root."""
        ...

    def read(self, body: bytes) -> ChatRequest:
        """Raises ChatRefused, of status 422."""
        ...

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]: ...

    def events(self, request: ChatRequest, reply: FinishedTurn) -> Iterator[bytes]:
        """The whole stream of server-sent events of the finished turn."""
        ...

    def refusal(self, status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
        """The body of an answer with this status; `param` is the key that is at fault."""
        ...


def event(value: Any, name: str = "") -> bytes:
    """A server-sent event of a JSON value."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


def unsupported(message: str, param: str, hint: str = "") -> RequestRefused:
    return refused(422, "unsupported", message, hint, param=param)


def checked_choice(choice: Any, path: str = "tool_choice") -> bool:
    """Whether parts of the answer are read as calls. Raises ChatRefused for a choice that a model would have to be held
    to."""
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise unsupported(
        f"{path}: {shown(choice)} given, expected auto or none.",
        path,
        "The engines have no grammars, so that nobody can hold a model to a call: say auto, and reward the call.",
    )


def stopping(told: Body, key: str = "stop") -> dict[str, Any]:
    """`stop`, the texts that end the answer: a list of those that are given, or nothing. Raises ChatRefused."""
    value = told.any(key)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if (
        not isinstance(texts, list)
        or len(texts) > MOST_STOP_TEXTS
        or not all(
            isinstance(one, str) and 0 < len(one) <= STOP_CHARS and REPLACEMENT not in one for one in texts
        )
    ):
        raise told.wrong(
            key,
            value,
            f"at most {MOST_STOP_TEXTS} texts of 1 to {STOP_CHARS} characters, none of them U+FFFD",
        )
    return {"stop": list(dict.fromkeys(texts))} if texts else {}


def longest(told: Body, *keys: str) -> dict[str, Any]:
    """`max_new_tokens`, of any of the keys, or nothing; the smallest where several are given. Raises ChatRefused."""
    given = [told.whole(key, None, 1, MOST_NEW_TOKENS) for key in keys if told.has(key)]
    return {"max_new_tokens": min(given)} if given else {}


def includes_usage(options: Any) -> bool:
    """Whether the last event of a stream is to have the usage. Raises ChatRefused."""
    if options is None:
        return False
    told = Body(STREAM_OPTIONS, options, "stream_options")
    usage = told.flag("include_usage")
    told.end()
    return usage


def usage_of(reply: FinishedTurn) -> dict[str, int]:
    prompt, drawn = reply.prompt_length, len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def token_logprobs(reply: FinishedTurn) -> list[dict[str, Any]]:
    """OpenAI's entry of each drawn token, which alone has a log-prob. A part of a character has no bytes."""
    return [
        {
            "token": text,
            "logprob": float(logprob),
            "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for text, logprob in zip(reply.token_texts, reply.logprobs, strict=True)
    ]
