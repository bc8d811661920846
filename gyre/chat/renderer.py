"""What turns messages into a prompt's tokens, and drawn tokens into an assistant's message.

Invariants, of every renderer:
- *what was decoded is never encoded*: a bridge adds tokens behind the path, and changes none of it;
- *foreign text is text*: no content of a message becomes a token that the frame is made of.

This module must not know of any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gyre.chat.messages import Message, Tool


class Renderer(Protocol):
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's message."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The prompt of a first turn, up to where the assistant begins. Raises ChatRefused for messages that have no
        place in the model's frame."""
        ...

    def bridge(
        self,
        prompt_ids: Sequence[int],
        drawn_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """What the new messages add after a turn of this prompt, which begins with all turns before, that drew
        `drawn_ids`: up to where the assistant begins, with the close that a turn lacks which was cut. None where the
        frame has no place for the messages there, so that a branch must begin."""
        ...

    def parse(self, prompt_ids: Sequence[int], drawn_ids: Sequence[int], tools: Sequence[Tool]) -> Message:
        """The assistant's message of drawn ids, whatever they are; its calls have no ids. `prompt_ids` is what its turn
        added before them, at least: some frames open a thought there."""
        ...

    def written(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to a text, of a special token its name, and of a part of a character U+FFFD."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The same, but that a special token is no text."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """What they are written as together, without special tokens."""
        ...
