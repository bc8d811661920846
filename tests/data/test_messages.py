"""Conversations: text is kept to the last part, and what is no text is refused by its reason."""

from __future__ import annotations

import json

import pytest

from gyre.data.messages import Unsupported, messages_of, refuse_columns, without_last_answer


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("q", user("q")),
        (user("q"), user("q")),
        (
            user([{"type": "text", "text": "Find "}, "x", {"type": "text", "text": ".", "image": None}]),
            user("Find x."),
        ),
        (user([{"text": "q"}]), user("q")),
        (user([{"type": "input_text", "text": "q"}]), user("q")),
        (
            [{"role": "user", "content": "q", "tool_calls": None, "images": [], "name": "n"}],
            [user("q")[0] | {"name": "n"}],
        ),
        (
            [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            [*user("q"), {"role": "assistant", "content": "a"}],
        ),
        (json.dumps(user("q")), user("q")),
        ("[1, 2] is a list", user("[1, 2] is a list")),
        ("[1, 2]", user("[1, 2]")),
    ],
)
def test_text_is_kept(prompt, messages):
    assert messages_of(prompt) == messages


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "no prompt"),
        (float("nan"), "no prompt"),
        ("", "an empty prompt"),
        ("  \n", "an empty prompt"),
        ([], "no messages"),
        (5, "no text"),
        ({"role": "user", "content": "q"}, "no text"),
        (["q"], "no text"),
        (user(None), "no content"),
        (user(5), "no text"),
        (user({"text": "q"}), "no text"),
        (user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]), "an image"),
        (user([{"type": "image"}]), "an image"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "an image"),
        (user([{"type": None, "image": "x", "text": "q"}]), "an image"),
        (user([{"type": "audio", "audio": "a.wav"}]), "audio"),
        (user([{"type": "input_audio", "input_audio": {"data": "x"}}]), "audio"),
        (user([{"type": "video", "video": "a.mp4"}]), "a video"),
        (user([{"type": "file", "file": "x"}]), "no text"),
        ([{"role": "user", "content": "q", "images": ["a.png"]}], "an image"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
            "a call of a tool",
        ),
        ([{"role": "assistant", "content": None, "function_call": {"name": "f"}}], "a call of a tool"),
        ([{"content": "q"}], "no role"),
        ([{"role": None, "content": "q"}], "no role"),
        ("[{'role': 'user', 'content': 'q'}]", "no text"),
    ],
)
def test_what_is_no_text_is_refused(prompt, reason):
    with pytest.raises(Unsupported) as raised:
        messages_of(prompt)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("images", [{"bytes": b"x"}], "an image"),
        ("image", {"path": "a.png"}, "an image"),
        ("audio", {"path": "a.wav"}, "audio"),
        ("videos", ["a.mp4"], "a video"),
        ("tools", [{"name": "f"}], "tools"),
    ],
)
def test_columns_that_a_prompt_of_text_would_lack(column, value, reason):
    for empty in (None, [], [None]):
        refuse_columns({column: empty}, frozenset())
    refuse_columns({column: value}, frozenset({column}))
    with pytest.raises(Unsupported) as raised:
        refuse_columns({"prompt": "q", column: value}, frozenset())
    assert raised.value.reason == reason


def test_the_assistant_s_last_turn_is_no_part_of_the_prompt():
    answer = {"role": "assistant", "content": "a"}
    assert without_last_answer(user("q")) == (user("q"), None)
    assert without_last_answer([*user("q"), answer, *user("p")]) == ([*user("q"), answer, *user("p")], None)
    assert without_last_answer([*user("q"), answer]) == (user("q"), "a")
    with pytest.raises(Unsupported, match="nothing is asked"):
        without_last_answer([answer])
    with pytest.raises(Unsupported, match="message 2, which asks, is empty"):
        without_last_answer([{"role": "system", "content": "s"}, *user(" "), answer])
