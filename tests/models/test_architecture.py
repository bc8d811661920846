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


def test_a_folder_without_a_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(ModelFolderError, match=r"config\.json cannot be read"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not JSON"):
        read_architecture(tmp_path)


def test_the_head_dimension_is_given_or_derived(tmp_path):
    assert read(tmp_path, head_dim=16).head_dim == 16
    assert read(tmp_path, head_dim="absent").head_dim == 8
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
    assert read(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope == Rope(7.0)
    old = read(tmp_path, rope_theta=500000.0, rope_scaling={**LLAMA3_ROPE, "rope_theta": None}).rope
    assert old == read(tmp_path, rope_parameters=LLAMA3_ROPE).rope
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
