"""What a turn answers, of what its tokens say: as the request wants its calls, with ids of Gyre's."""

from __future__ import annotations

from gyre.chat.history import call_id
from gyre.chat.messages import Message, ToolCall
from gyre.chat.requests import ChatRequest, said

PARSED = Message("assistant", "let me", "h", (ToolCall("", "f", "{}"), ToolCall("", "g", '{"a": 1}')))
TEXT = "<think>h</think>let me<tool_call>f<tool_call>g"


def test_calls_get_ids_of_their_turn() -> None:
    told = said(PARSED, ChatRequest(), TEXT, 3, "s")
    assert [one.id for one in told.tool_calls] == [call_id(3, 0, "s"), call_id(3, 1, "s")]
    assert [(one.name, one.arguments) for one in told.tool_calls] == [("f", "{}"), ("g", '{"a": 1}')]
    assert (told.content, told.reasoning) == ("let me", "h")
    assert said(PARSED, ChatRequest(), TEXT, 3, "s") == told


def test_who_wants_one_call_is_told_the_first() -> None:
    told = said(PARSED, ChatRequest(parallel_tool_calls=False), TEXT, 3, "s")
    assert [one.name for one in told.tool_calls] == ["f"]


def test_who_wants_none_is_told_the_text_as_it_was_drawn() -> None:
    assert said(PARSED, ChatRequest(calls_are_read=False), TEXT, 3, "s") == Message("assistant", TEXT)


def test_an_answer_without_calls_is_as_it_was_read() -> None:
    plain = Message("assistant", "4", "h")
    for request in (ChatRequest(), ChatRequest(calls_are_read=False), ChatRequest(parallel_tool_calls=False)):
        assert said(plain, request, TEXT, 0, "s") == plain
