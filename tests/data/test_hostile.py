"""Whatever a data set holds: prompts, or one sentence; never a traceback, and nothing that is not in the file."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.data.prepare import PromptRecipe, _Preparation
from gyre.data.readers import rows_of
from gyre.data.tokenizer import TextTokenizer, tokenizer_identity
from gyre.errors import ConfigError
from tests.data.small import write_tokenizer
from tests.examples import examples

TEXTS = st.text(st.characters(codec=None), max_size=6)  # halves of characters, too
CELLS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda cell: st.lists(cell, max_size=3) | st.dictionaries(TEXTS, cell, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["role", "content", "type", "text", "images", "tool_calls", "name", "from", "value"])
MESSAGES = st.lists(
    st.dictionaries(KEYS, CELLS | st.sampled_from(["user", "assistant", "text", "image"])), max_size=3
)
# fmt: off
COLUMNS = st.sampled_from([
    "prompt", "answer", "question", "messages", "instruction", "input", "solution", "reward_model", "max_new_tokens",
    "images", "tools", "epoch", "reference", "golden_answers", "x",
])
# fmt: on
ROWS = st.lists(st.dictionaries(COLUMNS, CELLS | MESSAGES, min_size=1, max_size=5), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


@settings(max_examples=examples(150), deadline=None)
@given(rows=ROWS, skip=st.booleans(), keep=st.booleans(), chat=st.booleans())
def test_any_rows_become_prompts_or_a_sentence(tokenizer, rows, skip, keep, chat):
    recipe = PromptRecipe(skip_unsupported=skip, keep_unanswered=keep, chat=chat)
    try:
        preparation = _Preparation(tokenizer, recipe, rows)
        found = list(preparation.prompts(rows))
    except ConfigError as error:
        print(str(error).encode())  # it can be printed
        return
    told = preparation.counted()
    assert len(found) + sum(told["left_out"].values()) == told["read"] == len(rows)
    for token_ids, line in found:
        meta = json.loads(line)
        assert token_ids
        assert set(meta) <= set(told["columns"])
        text = tokenizer.decode(token_ids)
        assert "None" not in text or "None" in str(rows)


# fmt: off
PIECES = st.sampled_from([
    b"{", b"}", b"[", b"]", b'"', b"a", b":", b",", b"\n", b"\r", b"1", b"null", b"\xff", b"\xef\xbb\xbf", b"\\ud83d",
    b"\0", b"PAR1", b"ARROW1", b"\x1f\x8b\x08", b'{"a": 1}\n', b"\t", b";", b"NaN",
])
# fmt: on


@settings(max_examples=examples(150), deadline=None)
@given(pieces=st.lists(PIECES, max_size=12))
@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "parquet.gz"]
)
def test_any_bytes_are_rows_or_a_sentence(tmp_path_factory, kind, pieces):
    file = tmp_path_factory.getbasetemp() / f"hostile.{kind}"
    file.write_bytes(b"".join(pieces))
    try:
        rows = list(rows_of(file))
    except ConfigError:
        return
    assert all(isinstance(row, dict) for row in rows)


# fmt: off
SETTINGS = st.sampled_from([
    "model", "added_tokens", "normalizer", "pre_tokenizer", "vocab", "merges", "eos_token", "eos_token_id", "content",
    "chat_template", "extra_special_tokens", "added_tokens_decoder", "vocab_size", "name", "template", "id",
])
# fmt: on


@settings(max_examples=examples(50), deadline=None)
@given(
    content=st.lists(PIECES, max_size=12).map(b"".join)
    | st.dictionaries(
        SETTINGS, CELLS | st.dictionaries(SETTINGS, CELLS) | st.lists(st.dictionaries(SETTINGS, CELLS))
    ).map(lambda told: json.dumps(told).encode())
)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
)
def test_any_tokenizer_is_read_or_a_sentence(tmp_path_factory, name, content):
    folder = write_tokenizer(tmp_path_factory.mktemp("hostile"))
    (folder / name).write_bytes(content)
    for read in (TextTokenizer, tokenizer_identity):
        with suppress(ConfigError):
            read(folder)
