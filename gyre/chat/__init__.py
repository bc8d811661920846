"""Conversations: messages and tokens, which turn a request goes on from, and what clients of chats speak. Pure.

Exports are resolved on first use.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "ChatRefused": "requests",
    "ChatRequest": "requests",
    "Message": "messages",
    "PackagedRenderer": "packaged",
    "PlainFrame": "plain",
    "PlainRenderer": "plain",
    "Renderer": "renderer",
    "Repeats": "retries",
    "FinishedTurn": "requests",
    "Tool": "messages",
    "ToolCall": "messages",
    "TurnHistory": "history",
    "call_id": "history",
    "locate": "history",
    "said": "requests",
}

__all__ = [
    "ChatRefused",
    "ChatRequest",
    "FinishedTurn",
    "Message",
    "PackagedRenderer",
    "PlainFrame",
    "PlainRenderer",
    "Renderer",
    "Repeats",
    "Tool",
    "ToolCall",
    "TurnHistory",
    "call_id",
    "locate",
    "said",
]

__getattr__ = lazy(__name__, _EXPORTS)
