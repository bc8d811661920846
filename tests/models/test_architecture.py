"""A config.json is understood or refused, never half read."""

from __future__ import annotations

import json
import math

import pytest

from gyre.models.architecture import Rope, read_architecture
from gyre.models.errors import ModelFolderError
from tests.engines.embedded.tiny import CONFIGS, LLAMA3_ROPE


def read(tmp_path, **changes):
    config = {**CONFIGS["qwen3"], **changes}
    config = {key: value for key, value in config.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3' needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, not '32'"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers must be a positive integer, not None"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_what_is_not_served_is_refused_with_its_name(tmp_path, changes, sentence):
    with pytest.raises(ModelFolderError, match=sentence):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            "rope_theta is 7.0, and rope_theta beside",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling say different things",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
            "rope_type is 'default' and type",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "does not use factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "does not use beta_fast"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"rope_theta": None}, "original_max_position_embeddings": 512},
            "original_max_position_embeddings",
        ),
        ({"num_kv_heads": 1}, "num_key_value_heads is 2 and num_kv_heads is 1"),
        (
            {"num_key_value_heads": "absent", "num_kv_heads": 2},
            "num_kv_heads is given, and num_key_value_heads",
        ),
        ({"multi_query": True}, "multi_query is True"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "two names of one thing"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation"),
        ({"seq_length": 2048}, "seq_length"),
        ({"text_config": {"hidden_size": 64}}, "text_config"),
        ({"vision_config": {"depth": 2}}, "vision_config"),
        ({"num_experts": 8}, "mixtures of experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "use_sliding_window"),
        ({"model_type": "llama", "sliding_window": 16}, "sliding_window is 16"),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "architectures names Qwen2ForCausalLM, and model_type is 'qwen3'",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"eos_token_id": -1}, "eos_token_id -1 is not in the vocabulary"),
        ({"eos_token_id": [1, 10**20]}, "eos_token_id 10{20} is not in the vocabulary"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map"),
    ],
)
def test_nothing_is_ignored(tmp_path, changes, sentence):
    with pytest.raises(ModelFolderError, match=sentence):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 1 << 20},
        {"layer_types": ["full_attention", "full_attention"]},
        {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "use_cache": True, "unsloth_version": "2025.1", "rope_scaling": None},
        {"quantization_config": None, "num_experts": 0, "text_config": {}, "partial_rotary_factor": 1.0},
        {"architectures": ["Qwen3ForCausalLM"], "transformers_version": "5.0", "attention_dropout": 0.1},
        {"rope_scaling": {"type": "default", "factor": 1.0}},
    ],
)
def test_what_changes_nothing_is_taken(tmp_path, changes):
    assert read(tmp_path, **changes) == read(tmp_path)


def test_a_folder_without_a_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(ModelFolderError, match=r"config\.json cannot be read"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not JSON"):
        read_architecture(tmp_path)


def test_the_head_dimension_is_given_or_derived(tmp_path):
    assert read(tmp_path, head_dim=16).head_dim == 16
    assert read(tmp_path, head_dim="absent").head_dim == 128, "the default of transformers"
    assert read(tmp_path, model_type="llama", head_dim="absent").head_dim == 8
    assert read(tmp_path, head_dim=None).head_dim == 8


def test_biases_are_those_of_the_family(tmp_path):
    qwen2 = read(tmp_path, model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, model_type="qwen3")
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm) == (False, False, True)
    llama = read(tmp_path, model_type="llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (True, True, True)


def test_rope_is_read_from_both_forms_of_the_config(tmp_path):
    assert read(tmp_path, rope_theta=5000.0).rope == Rope(5000.0)
    new = {"rope_type": "default", "rope_theta": 7.0}
    assert read(tmp_path, rope_theta="absent", rope_parameters=new).rope == Rope(7.0)
    assert read(tmp_path, rope_theta=7, rope_parameters=new, rope_scaling=new).rope == Rope(7.0)
    old = read(tmp_path, rope_theta=500000.0, rope_scaling={**LLAMA3_ROPE, "rope_theta": None}).rope
    assert old == read(tmp_path, rope_theta="absent", rope_parameters=LLAMA3_ROPE).rope
    assert old.kind == "llama3"


def test_llama3_scaling_keeps_fast_frequencies_and_slows_slow_ones():
    rope = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = Rope(500000.0).frequencies(128), rope.frequencies(128)
    assert scaled[0] == plain[0]
    assert math.isclose(scaled[-1], plain[-1] / 8)
    assert all(slow <= fast for fast, slow in zip(plain, scaled, strict=True))


def test_end_tokens_come_from_both_files(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read(tmp_path, eos_token_id=4).eos_token_ids == {4, 5, 6}
    assert read(tmp_path, eos_token_id=None).eos_token_ids == {5, 6}
