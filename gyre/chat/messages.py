"""What a conversation is made of: messages, calls of tools, and the tools that may be called.

This module must not know of tokens, or in which words a client says this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`id` is Gyre's, "" while it has none. `arguments` is the JSON text as the model wrote it, which may be none."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is one of ROLES. `tool_call_id` is, of a tool's message, the call that it answers; `name` is the tool's or
    the speaker's, where the client gave one."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
