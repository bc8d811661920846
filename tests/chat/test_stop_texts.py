"""Texts that end an answer: found with the first token that completes one, however many tokens come at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.chat.frame_tokenizer import FrameTokenizer
from gyre.chat.plain import PlainRenderer
from gyre.chat.stop_texts import Words, first_end, stop_of
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.chat.tokenizers import small
from tests.examples import examples

CHARACTERS = PlainRenderer(CharTokenizer("0123456789+-*=[]:"))


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> FrameTokenizer:
    return FrameTokenizer(small("qwen3", tmp_path_factory.mktemp("qwen3")))


def ended(ids: list[int], sizes: list[int], texts: list[str], words: Words) -> int | None:
    """Where the answer ends whose tokens come in chunks of these sizes, and then one by one."""
    at = 0
    while at < len(ids):
        size = sizes.pop(0) if sizes else 1
        end = first_end(ids[: at + size], at, texts, words)
        if end is not None:
            return end
        at += size
    return None


def by_definition(ids: list[int], texts: list[str], words: Words) -> int | None:
    return next(
        (at for at in range(1, len(ids) + 1) if any(one in words.text(ids[:at]) for one in texts)), None
    )


SIZES = st.lists(st.integers(1, 9), max_size=12)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.text("12=+", max_size=30),
    SIZES,
    st.lists(st.text("12=+", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_end_is_the_same_in_chunks_of_any_size(text: str, sizes: list[int], texts: list[str]) -> None:
    ids = CharTokenizer("0123456789+-*=[]:").encode(text).tolist()
    assert ended(ids, sizes, texts, CHARACTERS) == by_definition(ids, texts, CHARACTERS)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), sizes=SIZES)
def test_characters_of_several_tokens_are_found(
    of_bytes: FrameTokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    """Also cut in the midst of one, and beside bytes that are no character."""
    alphabet = st.sampled_from(["a", "b", " ", "日", "é", "🙂", "<|im_end|>", "<tool_call>"])
    texts = ["".join(data.draw(st.lists(alphabet, min_size=1, max_size=3))) for _ in range(2)]
    ids = of_bytes.encode("".join(data.draw(st.lists(alphabet, max_size=12))))
    for _ in range(data.draw(st.integers(0, 3))):
        if ids:
            ids.pop(data.draw(st.integers(0, len(ids) - 1)))
    assert ended(ids, sizes, texts, of_bytes) == by_definition(ids, texts, of_bytes)


@pytest.mark.parametrize(
    ("text", "texts", "stop", "before"),
    [
        ("12=+", ["=+"], "=+", 2),
        ("12=+", ["+", "2=+"], "2=+", 1),
        ("12=+", ["="], None, 0),
        ("", ["="], None, 0),
        ("12", [], None, 0),
    ],
)
def test_what_ended_an_answer_is_the_text_that_begins_first(
    text: str, texts: list[str], stop: str | None, before: int
) -> None:
    ids = CharTokenizer("0123456789+-*=[]:").encode(text).tolist()
    found = stop_of(ids, texts, CHARACTERS)
    assert (found and found.text, found.before if found else 0) == (stop, before)


def test_a_token_that_goes_beyond_the_text_ends_the_answer(of_bytes: FrameTokenizer) -> None:
    ids = of_bytes.encode("from __future__ import annotations")
    at, piece = next((at, one) for at, one in enumerate(of_bytes.written(ids)) if at > 1 and len(one) > 2)
    text = of_bytes.text(ids[:at])[-1] + piece[0]
    end = first_end(ids, 0, [text], of_bytes)
    assert end is not None
    assert end <= at + 1
    stop = stop_of(ids[:end], [text], of_bytes)
    assert stop is not None
    assert text not in of_bytes.text(ids[: end - 1])
    assert of_bytes.text(ids[:end]).startswith(of_bytes.text(ids[: stop.before]))
    assert text not in of_bytes.text(ids[: stop.before])
