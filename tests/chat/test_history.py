"""What comes back is recognised: a client that sends the whole conversation goes on from the turn that it heard."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.chat.history import (
    BRANCH,
    CLIENT_EDIT,
    GOES_ON,
    ROOT,
    TRUNCATION,
    Located,
    TurnHistory,
    call_id,
    is_same,
    locate,
)
from gyre.chat.messages import Message, ToolCall
from tests.examples import examples

SYSTEM, ASKED = Message("system", "be short"), Message("user", "37*58-9=")


def call(turn: int, arguments: str = '{"text": "37*58"}') -> Message:
    made = ToolCall(call_id(turn, 0, "s"), "calculator", arguments)
    return Message("assistant", reasoning="a product", tool_calls=(made,))


def result(turn: int, text: str = "2146") -> Message:
    return Message("tool", text, tool_call_id=call_id(turn, 0, "s"))


ANSWER = Message("assistant", "2137")
TURNS = [
    TurnHistory(ROOT, (SYSTEM, ASKED), call(0)),
    TurnHistory(0, (result(0),), call(1)),
    TurnHistory(1, (result(1),), ANSWER),
]
ALL = (SYSTEM, ASKED, call(0), result(0), call(1), result(1), ANSWER)
THANKS = Message("user", "thanks")


def test_the_first_request_goes_on_from_the_root() -> None:
    assert locate([], (SYSTEM, ASKED)) == Located(ROOT, (SYSTEM, ASKED), GOES_ON)


def test_a_request_goes_on_from_the_leaf_that_it_holds() -> None:
    assert locate(TURNS[:1], ALL[:4]) == Located(0, (result(0),), GOES_ON)
    assert locate(TURNS, (*ALL, THANKS)) == Located(2, (THANKS,), GOES_ON)


def test_another_message_after_an_inner_turn_is_a_branch() -> None:
    other = result(1, "2147")
    assert locate(TURNS, (*ALL[:5], other)) == Located(1, (other,), BRANCH)
    assert locate(TURNS, ALL[:4]) == Located(0, (result(0),), BRANCH)


def test_the_same_opening_again_is_another_branch_of_the_root() -> None:
    assert locate(TURNS, (SYSTEM, ASKED)) == Located(ROOT, (SYSTEM, ASKED), BRANCH)


def test_another_conversation_in_a_session_is_no_broken_one() -> None:
    helper = (SYSTEM, Message("user", "summarise"))
    assert locate(TURNS, helper) == Located(ROOT, helper, GOES_ON)


def test_an_edited_message_begins_a_branch_at_the_root() -> None:
    for edited in (
        (replace(SYSTEM, content="be long"), *ALL[1:], THANKS),
        (SYSTEM, replace(ASKED, content="37*58-9 ="), *ALL[2:], THANKS),
        (*ALL[:3], result(0, "2,146"), *ALL[4:], THANKS),
        (*ALL[:4], replace(call(1), content="let me see"), *ALL[5:], THANKS),
        (*ALL, replace(ANSWER, content="I am done"), THANKS),
    ):
        assert locate(TURNS, edited) == Located(ROOT, edited, CLIENT_EDIT)


def test_a_history_that_was_cut_short_says_so() -> None:
    for shrunk in ((SYSTEM, ASKED, ANSWER, THANKS), (*ALL[:2], *ALL[4:], THANKS), (SYSTEM, ASKED, THANKS)):
        assert locate(TURNS, shrunk) == Located(ROOT, shrunk, TRUNCATION)


def test_prose_in_place_of_calls_is_an_edit() -> None:
    """As smolagents sends them."""
    prose = (
        SYSTEM,
        ASKED,
        Message("assistant", "Calling tools: [...]"),
        Message("user", "Observation: 2146"),
    )
    assert locate(TURNS[:1], prose) == Located(ROOT, prose, CLIENT_EDIT)


def test_what_clients_change_in_passing_is_no_edit() -> None:
    """They drop what was reasoned, strip blanks, name the tool and write arguments anew; ids they keep."""
    plain = replace(call(0, '{ "text":"37*58"}'), reasoning="", content=" ")
    assert locate(TURNS[:1], (SYSTEM, ASKED, plain, replace(result(0), name="calculator"))).parent == 0
    assert not is_same(call(0), call(1))
    assert not is_same(call(0), replace(call(0), tool_calls=()))
    assert not is_same(call(0), call(0, '{"text": "37*59"}'))
    broken = '{"text": "37*'
    assert is_same(call(0, broken), call(0, broken))
    assert not is_same(call(0, broken), call(0, "{}"))


def test_of_turns_that_said_the_same_the_newest_goes_on() -> None:
    twice = [TurnHistory(ROOT, (ASKED,), ANSWER), TurnHistory(ROOT, (ASKED,), ANSWER)]
    assert locate(twice, (ASKED, ANSWER, THANKS)) == Located(1, (THANKS,), GOES_ON)


def test_a_calls_id_is_of_its_turn_and_its_session() -> None:
    assert call_id(3, 0, "train-17-3-0") == call_id(3, 0, "train-17-3-0")
    ids = {
        call_id(turn, index, salt) for turn in range(4) for index in range(4) for salt in ("a", "b", "1/a")
    }
    assert len(ids) == 48


TEXTS = st.text(max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[TurnHistory], list[tuple[Message, ...]]]:
    """Turns that go on from any earlier turn or the root, and of each its whole conversation."""
    turns: list[TurnHistory] = []
    paths: list[tuple[Message, ...]] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(ROOT, number - 1))
        added = tuple(Message("user", draw(TEXTS)) for _ in range(draw(st.integers(1, 2))))
        calls = tuple(
            ToolCall(call_id(number, at, "s"), "tool", json.dumps({"a": draw(TEXTS)}))
            for at in range(draw(st.integers(0, 2)))
        )
        turns.append(TurnHistory(parent, added, Message("assistant", draw(TEXTS), tool_calls=calls)))
        paths.append((*(paths[parent] if parent != ROOT else ()), *added, turns[-1].reply))
    return turns, paths


@settings(max_examples=examples(200), deadline=None)
@given(conversations(), st.data())
def test_whatever_the_tree_a_turn_is_found_by_its_conversation(
    tree: tuple[list[TurnHistory], list[tuple[Message, ...]]], data: st.DataObject
) -> None:
    """Invariant: the turns that are found hold the request's messages, all of them, in their order."""
    turns, paths = tree
    number = data.draw(st.integers(0, len(turns) - 1))
    new = Message("tool", "never said before")
    found = locate(turns, (*paths[number], new))
    assert found.new == (new,)
    assert len(paths[found.parent]) == len(paths[number])
    assert all(map(is_same, paths[found.parent], paths[number]))
    assert found.parent >= number
    assert found.cause == (BRANCH if any(turn.parent == found.parent for turn in turns) else GOES_ON)


@settings(max_examples=examples(200), deadline=None)
@given(conversations(), st.data())
def test_whatever_a_client_sends_nothing_of_it_is_lost(
    tree: tuple[list[TurnHistory], list[tuple[Message, ...]]], data: st.DataObject
) -> None:
    turns, paths = tree
    messages = data.draw(st.sampled_from(paths))
    kept = tuple(one for one in messages if data.draw(st.booleans()))
    sent = (*kept, Message("user", data.draw(TEXTS)))
    found = locate(turns, sent)
    before = paths[found.parent] if found.parent != ROOT else ()
    assert len(before) + len(found.new) == len(sent)
    assert all(map(is_same, (*before, *found.new), sent))
    assert found.parent == ROOT or not any(one.role == "assistant" for one in found.new)
