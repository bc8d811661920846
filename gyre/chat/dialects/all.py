"""The dialects, in the order in which documents list them.

This module must not know what any of them speaks.
"""

from __future__ import annotations

from gyre.chat.dialects.anthropic_messages import AnthropicCount, AnthropicMessages
from gyre.chat.dialects.dialect import Dialect
from gyre.chat.dialects.openai_chat import OpenaiChat
from gyre.chat.dialects.openai_responses import OpenaiResponses
from gyre.chat.dialects.token_ids import Completions, TokenIds

DIALECTS: tuple[Dialect, ...] = (
    OpenaiChat(),
    OpenaiResponses(),
    AnthropicMessages(),
    TokenIds(),
    Completions(),
)
"""Of turns."""

COUNT_TOKENS: Dialect = AnthropicCount()
"""Draws nothing: its answer is of the prompt alone."""
