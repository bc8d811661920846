"""Bodies that cannot be served are refused in a sentence."""

from __future__ import annotations

import pytest

from gyre.engines.embedded.core import Limits
from gyre.engines.embedded.errors import BadRequest
from gyre.engines.embedded.token_sampling import Sampling
from gyre.engines.embedded.wire import UnknownField, read_generate, read_sampling

LIMITS = Limits(max_running=4, max_tokens=1000, context_length=100)


def read(limits=LIMITS, **body):
    return read_generate(body, vocab=50, limits=limits)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_k": 0}, "top_k must be -1"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"min_p": 2}, "min_p must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"max_new_tokens": True}, "max_new_tokens must be"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"min_new_tokens must be an integer from 0 to .*8"),
        ({"stop_token_ids": [50]}, "stop_token_ids must be a list of token ids below 50"),
        ({"stop_token_ids": 5}, "stop_token_ids must be"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"sampling_seed": -1}, "sampling_seed must be"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is not served"),
        ({"stop": ["\n"]}, "stop is not served"),
        ({"n": 2}, "n is not served"),
        ("greedy", "sampling_params must be an object"),
    ],
)
def test_sampling_that_cannot_be_served_is_refused_by_name(params, sentence):
    with pytest.raises(BadRequest, match=sentence):
        read_sampling(params, vocab=50)


def test_an_unknown_sampling_key_is_refused_as_sglang_does():
    with pytest.raises(UnknownField, match=r"unknown field `temprature`, expected one of `max_new_tokens`, "):
        read_sampling({"temprature": 1.0}, vocab=50)


def test_values_that_change_nothing_are_accepted():
    params = {"n": 1, "repetition_penalty": 1.0, "stop": None, "skip_special_tokens": True, "regex": None}
    assert read_sampling({**params, "top_k": -1, "temperature": 0}, vocab=50)[0] == Sampling(temperature=0.0)
    assert read_sampling(None, vocab=50)[0] == Sampling()
    assert read_sampling({"top_k": 50}, vocab=50)[0].top_k == 0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "input_ids is missing"),
        ({"text": "hello"}, "no tokenizer"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [[1], []]}, "at least one token"),
        ({"input_ids": [1, 50]}, "50, which is no token id below the vocabulary size 50"),
        ({"input_ids": [1, -1]}, "-1, which is no token"),
        ({"input_ids": [1, "2"]}, "'2', which is no token"),
        ({"input_ids": [1, True]}, "True, which is no token"),
        (
            {"input_ids": [1] * 90, "sampling_params": {"max_new_tokens": 11}},
            "101 tokens.*context length of 100",
        ),
        ({"input_ids": [1], "rid": 7}, "rid must be a string"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1 entries for 2 prompts"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params has 1 entries for 2"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_with_why(body, sentence):
    given = {"sampling_params": {"max_new_tokens": 4}, **body}
    with pytest.raises(BadRequest, match=sentence):
        read(**given)


def test_more_tokens_than_the_cache_can_ever_hold_are_refused():
    with pytest.raises(BadRequest, match="exceeds max_total_tokens of 20"):
        read(Limits(4, 20, 100), input_ids=[1] * 10, sampling_params={"max_new_tokens": 11})


def test_a_batch_gives_each_prompt_its_own():
    params = {"max_new_tokens": 4}
    body = read(input_ids=[[1], [2, 3]], rid="r", sampling_params=params, return_logprob=[True, False])
    assert body.batched
    assert [prompt.rid for prompt in body.prompts] == ["r_0", "r_1"]
    assert [prompt.input_ids for prompt in body.prompts] == [[1], [2, 3]]
    assert [prompt.return_logprob for prompt in body.prompts] == [True, False]
