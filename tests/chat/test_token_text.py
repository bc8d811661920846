"""Text that comes piece by piece: no piece is taken back, and all of them are the text, whatever the tokenizer's
decoder does and wherever the tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gyre.chat.token_text import REPLACEMENT, TokenText
from tests.chat.decoder_kinds import KINDS, LETTERS, with_special

BUILT = {kind.__name__: with_special(kind) for kind in KINDS}
TEXTS = {name: TokenText(tokenizer) for name, tokenizer in BUILT.items()}


def _texts() -> st.SearchStrategy[str]:
    return (
        st.text(max_size=12)
        | st.text(LETTERS, max_size=12)
        | st.text("日本語。😀👩\u200d👧\ufffdé", max_size=6)
    )


@st.composite
def cut_tokens(draw: st.DrawFn, size: int, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of a text, or any, also some that nobody knows; and after how many of them a stream hears of them."""
    if draw(st.booleans()):
        ids = tokenizer.encode(draw(_texts()), add_special_tokens=False).ids
    else:
        ids = draw(st.lists(st.integers(0, size + 1), max_size=14))
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=6))
    return ids, sorted({*cuts, len(ids)})


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("special", [False, True])
def test_what_was_said_stays_and_is_the_text(name: str, special: bool) -> None:
    tokenizer, text = BUILT[name], TEXTS[name]

    @given(cut_tokens(tokenizer.get_vocab_size(), tokenizer))
    def cut_anywhere(drawn: tuple[list[int], list[int]]) -> None:
        ids, cuts = drawn
        whole = text.text(ids, special=special)
        assert whole == tokenizer.decode(ids, skip_special_tokens=not special)
        said = ""
        for cut in cuts:
            settled = text.settled(ids[:cut], special=special)
            assert settled.startswith(said)
            said = settled
        assert whole.startswith(said)

    cut_anywhere()


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("special", [False, True])
def test_a_token_stands_where_the_text_has_it(name: str, special: bool) -> None:
    """Where every token is whole characters, the texts between the offsets are what the tokens add."""
    tokenizer, text = BUILT[name], TEXTS[name]

    @given(cut_tokens(tokenizer.get_vocab_size(), tokenizer))
    def somewhere(drawn: tuple[list[int], list[int]]) -> None:
        ids, _ = drawn
        whole = text.text(ids, special=special)
        offsets = text.offsets(ids, special=special)
        assert len(offsets) == len(ids) == len(text.written(ids))
        assert offsets == sorted(offsets)
        assert all(0 <= at <= len(whole) for at in offsets)
        if name in ("across_tokens", "by_pattern", "suffixes"):  # what a token adds is not its own there
            return
        for at, (one, begin) in enumerate(zip(text.written(ids), offsets, strict=True)):
            end = offsets[at + 1] if at + 1 < len(ids) else len(whole)
            if begin and end > begin and not text._is_part(ids[at], one):
                assert whole[begin:end].strip() == one.strip()

    somewhere()


@pytest.mark.parametrize("name", ["byte_level", "llama_2", "gemma", "word_piece"])
def test_text_comes_before_its_end(name: str) -> None:
    """All but the last character or two of a plain text are settled."""
    tokenizer, text = BUILT[name], TEXTS[name]
    ids = tokenizer.encode("a b ab. a b!", add_special_tokens=False).ids
    assert text.settled(ids, special=False) == text.text(ids, special=False)


def test_a_run_of_bytes_is_told_once_it_has_ended() -> None:
    """A byte that fits nowhere would turn all of it into replacements."""
    tokenizer, text = BUILT["llama_2"], TEXTS["llama_2"]
    ids = tokenizer.encode("本a", add_special_tokens=False).ids
    assert [text.settled(ids[:at], special=False) for at in range(2, 6)] == ["", "", "", "本a"]
    broken = [*ids[1:4], tokenizer.token_to_id("<0xFF>")]
    assert text.text(broken, special=False) == REPLACEMENT * 4
