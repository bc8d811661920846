"""A session's tokens are what its model's template makes of the conversation, for ten families of models.

Random conversations, turn by turn, over the ledger's turns: each prompt begins with its parent's tokens, bit for bit,
unless the client edited; and their text is the whole conversation's, as the renderer's package writes it, and in the
part `clients` as the model's own template does. What templates drop of earlier turns is what was thought, and a
session keeps it. See `tests.chat.families` for which tokenizers are the models' own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gyre.chat.history import CAUSES, CLIENT_EDIT
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.chat.requests import ChatRequest
from gyre.rollouts.manager.sessions.conversations import TEMPLATE, Conversations
from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.plane.session_tree import ROOT, LedgerSession, LedgerTurn
from gyre.rollouts.plane.token_table import TokenTable
from gyre.rollouts.samples import Group
from tests.chat.families import FAMILIES, Family, Frame
from tests.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NO_EXPLANATION = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
"""Hypothesis explains a failure by tracing each line of some hundred runs, which takes minutes."""

MARKERS = (("<think>", "</think>"), ("<|channel>", "<channel|>"))
"""What stands before and after a thought."""
THOUGHT_ENDS = tuple(end for _, end in MARKERS)
LEFT = ("", "<think></think>", "<think></think>\n")
"""What templates leave of an earlier thought."""

TOOLS = (
    Tool(
        "calculator",
        "Computes.",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "string"}},
        },
    ),
    Tool("search", "Finds.", {"type": "object", "properties": {"q": {"type": "string"}}}),
)


def cases(families: Iterable[Family]) -> list[Any]:
    """Each by the package's rendering, and by the model's own template."""
    return [
        pytest.param((family, is_real), id=f"{family.name}-{kind}", marks=marks)
        for kind, is_real, marks in (("package", False, ()), ("template", True, pytest.mark.clients))
        for family in families
    ]


@pytest.fixture(scope="module", params=cases(FAMILIES))
def frame(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Frame:
    family, is_real = request.param
    return Frame(family, tmp_path_factory.mktemp("family"), is_real=is_real)


# -- a session of a client ---------------------------------------------------------------------------


@dataclass
class Talk:
    """A session with the ledger's turns. `known` is, of each turn, the conversation up to its answer."""

    frame: Frame
    tools: tuple[Tool, ...] = ()
    session: LedgerSession = field(default_factory=lambda: LedgerSession("s", "train", 0, 0, 0))
    known: list[list[Message]] = field(default_factory=list)
    why: str = ""

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.frame.renderer)

    def ask(self, messages: Sequence[Message]) -> LedgerTurn:
        """The turn that the client asks for, which has drawn nothing yet."""
        asked = ChatRequest(tuple(messages), self.tools)
        renderer = self.frame.renderer
        parent, prompt, note, self.why = self.conversations._prompt(renderer, self.session, asked)
        before = self.session.turns[parent] if parent != ROOT else None
        added = prompt[before.length :] if before else prompt
        if before:
            assert np.array_equal(prompt[: before.length], before.path()), (
                "it does not begin as its parent does"
            )
        number = len(self.session.turns)
        request = InFlightRequest(
            *("train", Group(number, added), 1, {"max_new_tokens": 1000}, 0, 0),
            number=number + 1,
            before=before.request if before else None,
            added=added,
        )
        sample = InFlightSample(request, 0, TokenTable(1))
        sample.row = 0
        request.samples = [sample]
        turn = LedgerTurn(number, parent, f"key-{number}", request, len(prompt), note)
        own = list(messages[len(self.known[parent]) :] if before else messages)
        self.known.append([*(self.known[parent] if before else []), *own])
        return turn

    def draw(self, turn: LedgerTurn, ids: Sequence[int], finish: str = "stop") -> Message:
        """The turn draws these ids. Gives what the client is told."""
        drawn = np.array(ids, np.int32)
        sample = turn.sample
        if len(drawn):
            one = np.ones(1)
            counts = np.array([len(drawn)], np.uint32)
            sample.table.append(
                np.zeros(1, np.uint32), counts, one.astype(np.int32), drawn, np.zeros(len(drawn), np.float32)
            )
        sample.finish = finish
        self.session.add(turn)
        reply = self.conversations.message_of(self.session, turn)
        self.known[turn.number].append(reply)
        return reply

    def check_text(self, turn: LedgerTurn) -> bool:
        """The turn's prompt is the whole conversation as text, but for what was thought before. Gives whether something
        was dropped."""
        whole = self.frame.whole(self.known[turn.number], self.tools, opening=True)
        ids: list[int] = turn.prompt_ids.tolist()
        told = self.frame.text(ids)
        if told == whole:
            return False
        assert re.fullmatch(self._with_thoughts_dropped(ids), whole), f"it is {told!r} and not {whole!r}"
        return True

    def _with_thoughts_dropped(self, ids: list[int]) -> str:
        """A pattern of the text in which each thought may be dropped, with the blanks behind it. By its tokens: a
        marker that somebody wrote is text."""
        name_of = self.frame.renderer.written
        begins, ends = (
            {one for one in set(ids) if name_of([one])[0] in markers}
            for markers in zip(*MARKERS, strict=True)
        )
        pattern, at = "", 0
        while at < len(ids):
            end = (
                next((to for to in range(at, len(ids)) if ids[to] in ends), None)
                if ids[at] in begins
                else None
            )
            if end is None:
                stop = next((to for to in range(at + 1, len(ids)) if ids[to] in begins), len(ids))
                pattern += re.escape(self.frame.text(ids[at:stop]))
                at = stop
                continue
            stop = next((to for to in range(end + 1, len(ids)) if ids[to] in begins), len(ids))
            rest = self.frame.text(ids[end + 1 : stop])
            kept = self.frame.text(ids[at : end + 1]) + rest[: len(rest) - len(rest.lstrip())]
            pattern += f"(?:{'|'.join(map(re.escape, (kept, *LEFT)))}){re.escape(rest.lstrip())}"
            at = stop
        return pattern


def _without(text: str, start: str) -> str:
    assert text.startswith(start), f"{text[:80]!r} does not begin with {start[:80]!r}"
    return text[len(start) :]


def drawn_text(frame: Frame, known: Sequence[Message], reply: Message, tools: Sequence[Tool]) -> str:
    """What the model draws to answer this, as its template writes it, with what ends it."""
    opened = frame.whole(known, tools, opening=True)
    text = _without(frame.whole([*known, reply], tools, opening=False), opened)
    end = frame.family.ends[bool(reply.tool_calls)]
    at = text.find(end)
    return text[: at + len(end)] if at >= 0 else text + end


# -- what is said ------------------------------------------------------------------------------------

_WORDS = ("what", "is", "4", "é", "漢字", "🙂", "<b>", "'", '"', "\\", "{", "}")
_BLANKS = (" ", "\n", "  \n\n")
_LITERALS = (
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<|eot_id|>",
    "<|user|>",
    "<turn|>",
    "<｜User｜>",
)

spoken = st.lists(st.sampled_from(_WORDS + _BLANKS), max_size=5).map("".join).map(str.strip)
"""What a model says: without blanks at its ends, which templates cut off."""
foreign = st.lists(st.sampled_from(_WORDS + _BLANKS + _LITERALS), max_size=5).map("".join)
"""What users and tools say, control tokens as text among it."""
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "a": st.integers(-3, 10**12),
    "b": st.booleans(),
    "c": spoken,
    "q": st.sampled_from(["4", "é 漢", 'a"b']),
}


@st.composite
def calls_of(draw: st.DrawFn, family: Family, first: int) -> tuple[ToolCall, ...]:
    made = []
    for number in range(draw(st.integers(1, family.most_calls))):
        tool = draw(st.sampled_from(TOOLS))
        names = [one for one in tool.parameters["properties"] if one != "b" or family.writes_booleans]
        chosen = draw(st.lists(st.sampled_from(names), unique=True))
        arguments = {name: draw(VALUES[name]) for name in chosen}
        text = json.dumps(arguments, ensure_ascii=False)
        made.append(ToolCall(f"call_{first + number}", tool.name, text))
    return tuple(made)


@st.composite
def replies_of(draw: st.DrawFn, family: Family, tools: Sequence[Tool]) -> Message:
    calls = draw(calls_of(family, 0)) if tools and draw(st.booleans()) else ()
    content = draw(spoken) if family.says_with_calls or not calls else ""
    thinks = family.thinks and (family.thinks_always or draw(st.booleans()))
    thought = (draw(spoken) or "hm") if thinks else ""
    return Message("assistant", content or ("" if calls else "4"), thought, calls)


def _comparable(message: Message) -> tuple[Any, ...]:
    calls = [(one.name, json.loads(one.arguments)) for one in message.tool_calls]
    return message.content.strip(), message.reasoning.strip(), calls


def results_of(draw: Any, reply: Message) -> list[Message]:
    """What comes after an answer."""
    if not reply.tool_calls:
        return [Message("user", draw(foreign) or "Go on.")]
    return [Message("tool", draw(foreign), tool_call_id=one.id, name=one.name) for one in reply.tool_calls]


# -- properties --------------------------------------------------------------------------------------


def test_prompts_are_the_whole_conversation_and_begin_as_their_parents_do(frame: Frame) -> None:
    dropped = []

    @settings(max_examples=examples(60), deadline=None, phases=NO_EXPLANATION)
    @given(st.data())
    def talk(data: st.DataObject) -> None:
        tools = TOOLS if frame.family.takes_tools and data.draw(st.booleans()) else ()
        talk = Talk(frame, tools)
        told = [Message("system", data.draw(foreign) or "Be short.")] if data.draw(st.booleans()) else []
        told.append(Message("user", data.draw(foreign) or "What?"))
        is_edited = False
        for number in range(data.draw(st.integers(2, 5))):
            turn = talk.ask(told)
            if is_edited:
                assert talk.why in CAUSES
            else:
                assert (turn.parent, talk.why) == (number - 1, ""), "it begins a branch"
            dropped.append(talk.check_text(turn))
            wanted = data.draw(replies_of(frame.family, tools))
            text = drawn_text(frame, talk.known[number], wanted, tools)
            reply = talk.draw(turn, frame.ids(text))
            assert _comparable(reply) == _comparable(wanted)
            if data.draw(st.booleans()):  # most clients send no thoughts back
                reply = replace(reply, reasoning="")
            told = [*told, reply, *results_of(data.draw, reply)]
            is_edited = data.draw(st.integers(0, 5)) == 0
            if is_edited:
                at = next(at for at, one in enumerate(told) if one.role == "user")
                told[at] = replace(told[at], content=f"{told[at].content} {number}?")

    talk()
    if frame.family.name in ("qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "gemma4", "nemotron-3.5"):
        assert any(dropped), "its template drops what was thought, and no example had that"
    else:
        assert not any(dropped)


def test_a_turn_that_was_cut_anywhere_goes_on(frame: Frame) -> None:
    """After any of its tokens, in a thought, a text or a call: the close that it lacks is added, and no branch
    begins."""
    family = frame.family
    call = (ToolCall("call_0", "search", '{"q": "4"}'),) if family.takes_tools else ()
    wanted = Message(
        "assistant", "It is é." if family.says_with_calls else "", "hm" if family.thinks else "", call
    )
    told = [Message("user", "What is 2+2?")]
    tools = TOOLS if family.takes_tools else ()
    ids = frame.ids(drawn_text(frame, told, wanted, tools))
    for length in range(len(ids)):
        talk = Talk(frame, tools)
        first = talk.ask(told)
        reply = talk.draw(first, ids[:length], "length")
        turn = talk.ask([*told, reply, *results_of(lambda _: "Go on.", reply)])
        if (
            family.name == "gemma4" and reply.tool_calls
        ):  # a result stands behind an end that only the model can draw
            assert (turn.parent, talk.why) == (ROOT, TEMPLATE)
            continue
        assert (turn.parent, talk.why) == (0, ""), f"cut after {frame.text(ids[:length])!r}"
        added = frame.text(turn.request.added.tolist())
        assert "Go on." in added
        assert turn.request.added[0] in frame.renderer.stop_token_ids or added.startswith(THOUGHT_ENDS)


@pytest.mark.parametrize("frame", cases(one for one in FAMILIES if one.takes_tools), indirect=True)
def test_other_tools_are_an_edit(frame: Frame) -> None:
    """They stand at the conversation's beginning: the model would be told of those that are gone."""
    talk = Talk(frame, TOOLS)
    told = [Message("user", "What is 2+2?")]
    first = talk.ask(told)
    reply = talk.draw(
        first,
        frame.ids(
            drawn_text(frame, told, Message("assistant", "4", "hm" if frame.family.thinks else ""), TOOLS)
        ),
    )
    more = [*told, reply, Message("user", "Sure?")]
    assert talk.ask(more).parent == 0
    talk.known.pop()
    talk.tools = TOOLS[:1]
    turn = talk.ask(more)
    assert (turn.parent, talk.why) == (ROOT, CLIENT_EDIT)
    talk.check_text(turn)


@pytest.mark.parametrize("frame", cases(one for one in FAMILIES if one.thinks), indirect=True)
def test_a_stop_in_a_thought_begins_a_branch(frame: Frame) -> None:
    """The package has no place for a turn behind it. It is counted as the template's."""
    talk = Talk(frame)
    told = [Message("user", "What is 2+2?")]
    first = talk.ask(told)
    text = drawn_text(frame, told, Message("assistant", "4", "hm"), ())
    cut = text[: text.index("hm") + 2]
    reply = talk.draw(first, [*frame.ids(cut), frame.renderer.stop_token_ids[0]])
    turn = talk.ask([*told, reply, Message("user", "Sure?")])
    assert (turn.parent, talk.why) == (ROOT, TEMPLATE)
