"""The tables of keys: nothing else decides, false is no silence, and the page says what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params as openai_params

from gyre import request_body as bodies
from gyre.request_body import RequestRefused
from gyre.rollouts.manager.door.dialects import DIALECTS, OpenaiDialect, SglangDialect, Told
from gyre.rollouts.manager.door.keys import (
    ANYTHING,
    COMPLETIONS,
    GENERATE,
    POLICY,
    SAMPLING,
    STREAM_OPTIONS,
    Keys,
)
from gyre.rollouts.manager.door.words import ModelWords
from tools.door_keys import pages

FALSE: tuple[Any, ...] = (False, 0, 0.0, "", [], {})
SAID: tuple[Any, ...] = (True, 1, -1, 0.5, "text", ["text"], [1], {"a": 1})


class Letters:
    """A tokenizer that begins each text with a begin token."""

    def encode(self, texts: Any, *, special: bool) -> list[list[int]]:
        return [[0] * special + [ord(one) % 90 + 3 for one in text] for text in texts]

    def decode(self, token_ids: Any, *, special: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def settled(self, token_ids: Any, *, special: bool = False) -> str:
        return self.decode(token_ids)

    def written(self, token_ids: Any) -> list[str]:
        return [chr(one) for one in token_ids]

    def offsets(self, token_ids: Any, *, special: bool = False) -> list[int]:
        return list(range(len(token_ids)))


WORDS = ModelWords((2,), 512, Letters())


def read(keys: Keys, body: dict[str, Any]) -> Told:
    """The body by the dialect whose table this is, with a prompt."""
    if keys is SAMPLING:
        body = {"sampling_params": body}
    elif keys is STREAM_OPTIONS:
        body = {"stream": True, "stream_options": body}
    if keys in (COMPLETIONS, STREAM_OPTIONS):
        return OpenaiDialect.read(json.dumps({"prompt": [5], **body}).encode(), None, WORDS, "fleet")
    prompt = {} if "text" in body else {"input_ids": [5]}
    return SglangDialect.read(json.dumps({**prompt, **body}).encode(), None, WORDS, "fleet")


ROWS = [
    (keys, name)
    for keys in (GENERATE, SAMPLING, COMPLETIONS, STREAM_OPTIONS)
    for name, row in keys.rows.items()
    if not row.is_taken
]


@pytest.mark.parametrize(("keys", "name"), ROWS)
def test_a_key_passes_at_its_neutral_values_and_at_no_other(keys: Keys, name: str) -> None:
    row = keys.rows[name]
    plain = read(keys, {}).asked.digest
    for value in (None, *(one for one in row.passes if one is not ANYTHING)):
        assert read(keys, {name: value}).asked.digest == plain
    for value in (*FALSE, *SAID):
        if ANYTHING in row.passes:
            assert read(keys, {name: value}).asked.digest == plain
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in row.passes):
            with pytest.raises(RequestRefused) as refused:
                read(keys, {name: value})
            assert refused.value.details["reason"] == "unsupported"
            assert name in str(refused.value)
            assert refused.value.details["param"].endswith(name)


def test_zero_is_no_truth_value() -> None:
    for keys, name, value in (
        *((COMPLETIONS, "echo", value) for value in (0, "", [])),
        *((GENERATE, "top_logprobs_num", value) for value in (False, 0.5, [])),
        *((SAMPLING, "repetition_penalty", value) for value in (True, 0)),
        (COMPLETIONS, "best_of", True),
        (SAMPLING, "min_new_tokens", False),
    ):
        with pytest.raises(RequestRefused):
            read(keys, {name: value})
    assert read(SAMPLING, {"repetition_penalty": 1.0}).asked.digest == read(SAMPLING, {}).asked.digest


@pytest.mark.parametrize("value", [*FALSE, *SAID])
def test_a_key_that_no_table_has_is_refused_and_null_is_silence(value: Any) -> None:
    for keys in (GENERATE, SAMPLING, COMPLETIONS, STREAM_OPTIONS):
        assert read(keys, {"tempratur": None}).asked.digest == read(keys, {}).asked.digest
        with pytest.raises(RequestRefused, match="tempratur"):
            read(keys, {"tempratur": value})
    with pytest.raises(RequestRefused, match="did you mean 'temperature'"):
        read(SAMPLING, {"tempratur": value})


def test_dialects_read_the_keys_that_are_taken_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, str]] = set()
    plain = bodies.Body.any

    def any_of(body: bodies.Body, key: str) -> Any:
        asked.add((body._keys.of, key))
        return plain(body, key)

    monkeypatch.setattr(bodies.Body, "any", any_of)
    read(GENERATE, {"policy": {"at_least": 0}})
    read(COMPLETIONS, {"policy": {"exact": 0}, "stream": True, "stream_options": {"include_usage": True}})
    for keys in (GENERATE, SAMPLING, COMPLETIONS, STREAM_OPTIONS, POLICY):
        taken = {name for name, row in keys.rows.items() if row.is_taken}
        assert taken == {key for of, key in asked if of == keys.of}


@pytest.mark.parametrize("value", [False, 0, "", []])
def test_an_empty_value_of_a_key_that_is_taken_is_no_silence(value: Any) -> None:
    """It is of the key's form, or refused."""
    for keys, name in ((GENERATE, "sampling_params"), (GENERATE, "policy"), (COMPLETIONS, "stream_options")):
        with pytest.raises(RequestRefused, match="expected"):
            read(keys, {name: value, **({"stream": True} if keys is COMPLETIONS else {})})
    with pytest.raises(RequestRefused):
        read(COMPLETIONS, {"model": value})
    with pytest.raises(RequestRefused, match="max_new_tokens: None"):
        read(SAMPLING, {"max_new_tokens": None})


def test_a_text_has_the_tokens_that_are_added_unless_the_client_wants_none() -> None:
    for value, first in ((None, 0), (True, 0), (False, ord("a") % 90 + 3)):
        told = read(COMPLETIONS, {"prompt": "abc", "add_special_tokens": value})
        assert told.asked.prompt_ids[0] == first


@pytest.mark.parametrize(
    ("keys", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (GENERATE, {"input_ids": [[1], [2]]}),
        (GENERATE, {"text": ["a", "b"]}),
    ],
)
def test_a_list_of_prompts_is_refused_with_what_to_do(keys: Keys, body: dict[str, Any]) -> None:
    with pytest.raises(
        RequestRefused, match=r"a list of 2 prompts given.* Send a request for each, all at once"
    ):
        read(keys, body)


def test_a_list_of_one_prompt_is_that_one() -> None:
    assert read(COMPLETIONS, {"prompt": [[7, 8]]}).asked.prompt_ids.tolist() == [7, 8]


@pytest.mark.parametrize(
    "options", [{"include_usag": True}, {"continuous_usage_stats": True}, {"include_usage": "yes"}, [], True]
)
def test_stream_options_are_known_or_refused(options: Any) -> None:
    with pytest.raises(RequestRefused, match="stream_options"):
        read(COMPLETIONS, {"stream": True, "stream_options": options})


def test_stream_options_are_of_streams() -> None:
    with pytest.raises(RequestRefused, match="no stream"):
        read(COMPLETIONS, {"stream_options": {"include_usage": True}})


def test_the_table_has_every_key_of_openais_client() -> None:
    theirs = {*openai_params.CompletionCreateParamsStreaming.__annotations__}
    theirs |= {*openai_params.CompletionCreateParamsBase.__annotations__}
    assert theirs <= {*COMPLETIONS.rows}
    options = openai_params.ChatCompletionStreamOptionsParam.__annotations__
    assert {*options} <= {*STREAM_OPTIONS.rows}
    assert {dialect.path for dialect in DIALECTS} == {"/generate", "/v1/completions"}


def test_the_page_says_what_the_tables_say() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, "python tools/door_keys.py writes it anew"
