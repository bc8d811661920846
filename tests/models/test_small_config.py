"""Configurations made small: one layer of each kind, and what begins after a number of tokens begins soon."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.models.small_config import LENGTH, VOCAB, small_configs

LARGE: dict[str, Any] = {
    "model_type": "another",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "linear_attention"] * 10,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "eos_token_id": [128001, 128009],
    "bos_token_id": 128000,
}


def first(**changes: Any) -> dict[str, Any]:
    return next(small_configs(LARGE | changes))


def test_of_each_kind_of_layer_there_is_one_in_their_order() -> None:
    small = first()
    assert small["layer_types"] == ["sliding_attention", "full_attention", "linear_attention"]
    assert small["num_hidden_layers"] == 3


def test_layers_that_share_keys_have_others_of_their_kinds() -> None:
    small = first(num_kv_shared_layers=20)
    assert small["layer_types"] == ["sliding_attention", "full_attention", "linear_attention"] * 2
    assert small["num_kv_shared_layers"] == 3


def test_lists_of_layers_by_number_follow() -> None:
    small = first(layer_types=None, attn_layer_indices=[9, 18, 27])
    assert (small["num_hidden_layers"], small["attn_layer_indices"]) == (2, [1])


def test_a_pattern_is_whole() -> None:
    small = first(layer_types=None, block_types=["recurrent", "recurrent", "attention"])
    assert small["block_types"] == ["recurrent", "attention"]


@pytest.mark.parametrize(
    "name",
    [
        "sliding_window",
        "attention_chunk_size",
        "local_attention",
        "floor_scale",
        "index_topk",
        "keep_window_size",
        "window_size",
        "a_number_that_nobody_knows",
    ],
)
def test_what_begins_after_a_number_of_tokens_begins_soon(name: str) -> None:
    assert first(**{name: 8192})[name] * 2 < LENGTH


def test_what_a_layer_does_otherwise_stays() -> None:
    small = first(attn_temperature_tuning=True, attn_scale=0.1)
    assert small["final_logit_softcapping"] == 30.0
    assert (small["attn_temperature_tuning"], small["attn_scale"]) == (True, 0.1)


def test_tokens_are_of_the_small_vocabulary() -> None:
    small = first()
    assert small["vocab_size"] == VOCAB
    assert {small["eos_token_id"], small["bos_token_id"]} < set(range(VOCAB))


@pytest.mark.parametrize(("keys", "small"), [(8, 2), (32, 4), (1, 1)])
def test_heads_of_keys_are_shared_as_they_were(keys: int, small: int) -> None:
    found = first(num_key_value_heads=keys)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (4, small)


def test_a_small_one_is_made_as_large_as_the_others() -> None:
    """Sizes that depend on each other are those of every copy, also where a configuration has smaller ones."""
    small = first(vocab_size=48, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    assert [small[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")] == [VOCAB, 32, 4]
