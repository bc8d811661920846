"""A client's request for a turn and what it is answered, whatever it speaks.

This module must not know of a client's words, or where an answer comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.chat.history import call_id
from gyre.chat.messages import Message, Tool
from gyre.request_body import RequestRefused as ChatRefused

__all__ = ["ChatRefused", "ChatRequest", "FinishedTurn", "said"]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for.

    `sampling` has the engine's names, and of these only what was given: max_new_tokens, temperature, top_p, top_k,
    min_p, stop_token_ids, ignore_eos; and `stop`, the texts that end the answer. `prompt_ids`, int32 `[p]`, is the
    prompt of a body that has token ids, whose `messages` are empty. `calls_are_read` is false where no part of the
    answer is to be taken for a call (`tool_choice: "none"`), and `parallel_tool_calls` where it may have one call at
    most."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    model: str = ""
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    """A stream's last event has the usage."""
    calls_are_read: bool = True
    parallel_tool_calls: bool = True
    prompt_ids: NDArray[np.int32] | None = None
    after: str = ""
    """The id of the answer that it goes on from: `messages` are those after it. "" where they are all."""
    is_instructed: bool = False
    """The first message is of this request alone: who goes on from its answer says it again, or has none."""
    is_stored: bool = True
    """Others may go on from its answer by the id."""

    @property
    def wants_prompt(self) -> bool:
        """Whether it is told the prompt's token ids, which it does not know."""
        return self.token_ids and self.prompt_ids is None


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A finished turn, as the ledger has it: the same one gives the same bytes each time it is told.

    `created` is in whole seconds since 1970. `message` has tool-call ids, and ends before the text that ended the
    answer. `finish` is `stop` or `length`; `stopped_by` is that text, "" where none did. `prompt_length` counts all
    tokens before the drawn ones, and `prompt_ids` are these, where `wants_prompt` of the request; `token_ids`,
    `logprobs` (natural, finite) and, where `logprobs` of the request, `token_texts` are of the drawn ones, in order,
    each of the same length; `versions` has `[version, start, end]` of runs of these."""

    id: str
    created: int
    model: str
    message: Message
    finish: str
    prompt_length: int = 0
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    token_texts: Sequence[str] = ()
    versions: Sequence[Sequence[int]] = ()
    stopped_by: str = ""


def said(parsed: Message, request: ChatRequest, drawn_text: str, turn: int, salt: str) -> Message:
    """What turn number `turn` of a session answers, of what a renderer read in its tokens: with Gyre's call ids, and as
    the request wants its calls. It is what history has of the turn. `drawn_text` is the answer's whole text, which
    stands where calls are not to be read; `salt` is the session's id."""
    if not parsed.tool_calls:
        return parsed
    if not request.calls_are_read:
        return replace(parsed, content=drawn_text, reasoning="", tool_calls=())
    calls = parsed.tool_calls if request.parallel_tool_calls else parsed.tool_calls[:1]
    return replace(
        parsed,
        tool_calls=tuple(replace(one, id=call_id(turn, at, salt)) for at, one in enumerate(calls)),
    )
