"""What a tokenizer's numbers stand for, by content: the same for the same cuts, another for others."""

from __future__ import annotations

import json

import pytest

from gyre.data.tokenizer import tokenizer_identity
from gyre.errors import ConfigError
from tests.data.small import write_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return json.loads((write_tokenizer(tmp_path_factory.mktemp("model")) / "tokenizer.json").read_text())


def identity(folder, content, **form):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content, **form))
    return tokenizer_identity(folder)


def swapped(vocab):
    (one, first), (other, second) = list(vocab.items())[40:42]
    return {**vocab, one: second, other: first}


SAME = {
    "indented": lambda found: found,
    "padding": lambda found: {**found, "padding": {"strategy": {"Fixed": 64}, "direction": "Right"}},
    "truncation": lambda found: {**found, "truncation": {"max_length": 16, "stride": 0}},
    "another order": lambda found: (
        dict(reversed(found.items()))
        | {"model": found["model"] | {"vocab": dict(reversed(found["model"]["vocab"].items()))}}
    ),
    "merges as texts": lambda found: {
        **found,
        "model": found["model"] | {"merges": [" ".join(pair) for pair in found["model"]["merges"]]},
    },
    "without defaults": lambda found: {
        **found,
        "pre_tokenizer": {"type": "ByteLevel"},
        "model": {key: value for key, value in found["model"].items() if value not in (None, False)},
    },
    "another decoder": lambda found: {**found, "decoder": None},
}
OTHER = {
    "two numbers swapped": lambda found: {
        **found,
        "model": found["model"] | {"vocab": swapped(found["model"]["vocab"])},
    },
    "merges in another order": lambda found: {
        **found,
        "model": found["model"] | {"merges": found["model"]["merges"][::-1]},
    },
    "one token more": lambda found: {
        **found,
        "added_tokens": [*found["added_tokens"], {"id": 300, "content": "<x>", "special": True}],
    },
    "a token that is not special": lambda found: {
        **found,
        "added_tokens": [{**found["added_tokens"][0], "special": False}, *found["added_tokens"][1:]],
    },
    "a normaliser": lambda found: {**found, "normalizer": {"type": "NFC"}},
    "another pre-tokeniser": lambda found: {**found, "pre_tokenizer": {"type": "Whitespace"}},
    "a space in front": lambda found: {
        **found,
        "pre_tokenizer": found["pre_tokenizer"] | {"add_prefix_space": True},
    },
}


@pytest.mark.parametrize("how", SAME)
def test_the_file_s_form_makes_no_difference(tmp_path, saved, how):
    changed = identity(tmp_path / "b", SAME[how](saved), indent=2, ensure_ascii=True)
    assert changed == identity(tmp_path / "a", saved, ensure_ascii=False)


@pytest.mark.parametrize("how", OTHER)
def test_what_cuts_texts_otherwise_is_another_tokenizer(tmp_path, saved, how):
    assert identity(tmp_path / "a", saved) != identity(tmp_path / "b", OTHER[how](saved))


def test_without_a_tokenizer_there_is_nothing_to_compare(tmp_path):
    assert tokenizer_identity(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        tokenizer_identity(tmp_path)
