"""What a small copy of a model tells before anything is trained: what looks ahead, what sees its neighbours beyond a
window, what gets no gradient. Each kind is one that was wrong, or did not begin, without it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from gyre.errors import ConfigError
from gyre.models.small_model import small_model, tokens_of, transformers_config
from gyre.workloads.fsdp import small_check
from gyre.workloads.fsdp.model import build_causal
from gyre.workloads.fsdp.small_check import SmallCheckResult, try_small
from gyre.workloads.fsdp.token_model import TokenModel

pytestmark = pytest.mark.landing

CPU = torch.device("cpu")


def tried(kind: str, *, values: bool = False, attention: str = "auto", **changes: Any) -> SmallCheckResult:
    config = CONFIG_MAPPING[kind](**changes)
    return try_small(config, attention=attention, values=values, device=CPU, seed=1)


BEGIN = [
    "afmoe", "bamba", "biogpt", "falcon", "falcon_h1", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "gptj",
    "granitemoehybrid", "llama4_text", "mamba", "mamba2", "nemotron_h", "opt", "rwkv", "xglm",
]  # fmt: skip


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("kind", BEGIN)
def test_kinds_with_outputs_attention_and_configs_of_their_own_begin(kind: str) -> None:
    found = tried(kind)
    assert not found.untried
    assert found.selects
    assert not found.unreached


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("kind", BEGIN)
def test_a_config_that_transformers_wrote_is_read_and_built_without_memory(kind: str) -> None:
    told = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    small = json.loads(small_model(transformers_config(told)).config.to_json_string(use_diff=False))
    model = TokenModel(build_causal(small, "auto"), values=False)
    assert all(one.device.type == "meta" for one in model.parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "ways"),
    [
        ("qwen3", {}, ["segments", "positions", "masks"]),
        ("phimoe", {"sliding_window": 4096}, ["positions", "masks"]),
        ("llama4_text", {"attn_temperature_tuning": True}, []),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, []),
        ("qwen3_5_text", {}, []),
        ("bloom", {}, []),
    ],
)
def test_only_a_way_that_is_right_beyond_windows_and_tunings_is_taken(
    kind: str, changes: dict[str, Any], ways: list[str]
) -> None:
    assert tried(kind, **changes).ways == ways


def test_without_a_window_the_same_kind_is_packed_the_fast_way() -> None:
    assert tried("phimoe", sliding_window=None).ways[0] == "segments"


@pytest.mark.parametrize("kind", ["bert", "xlnet"])
def test_a_model_that_looks_ahead_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="looks ahead"):
        tried(kind)


def test_the_same_kind_is_taken_where_it_is_a_decoder() -> None:
    assert tried("bert", is_decoder=True).ways


def test_what_lies_before_the_output_layer_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it does not, the parameter is named, and all logits are computed instead."""
    assert tried("modernbert-decoder").selects
    monkeypatch.setattr(
        TokenModel, "_behind_base", lambda self: list(self.causal.get_output_embeddings().parameters())
    )
    assert not tried("modernbert-decoder").selects
    causal = small_model(CONFIG_MAPPING["modernbert-decoder"]())
    check = small_check._Check(causal, False, CPU, 1)
    assert "lm_head" in (said := check.problem_with("alone", selects=True))
    assert "gets no gradient" in said


def test_parameters_that_only_some_sequences_reach_are_told() -> None:
    assert any("compressor" in one for one in tried("deepseek_v4").seldom)
    assert not tried("qwen3").seldom


def test_a_difference_of_less_than_bfloat16_rounds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = TokenModel.forward

    def forward(self: TokenModel, *args: Any, **kwargs: Any) -> Any:
        said, entropies = exact(self, *args, **kwargs)
        return said * (1.002 if self.way == "segments" else 1.0), entropies

    monkeypatch.setattr(TokenModel, "forward", forward)
    found = tried("qwen3")
    assert "segments" not in found.ways
    assert "differ" in found.others["segments"]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mamba2", "modernbert-decoder"])
def test_a_value_head_is_tried_too(kind: str) -> None:
    found = tried(kind, values=True)
    assert not found.untried
    assert found.selects


def test_the_attention_that_a_job_names_is_that_which_is_tried() -> None:
    found = tried("qwen3", attention="eager")
    assert "segments" not in found.ways
    assert found.ways


def test_what_cannot_be_made_small_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.models.small_model.small_configs", lambda told: iter(()))
    found = tried("qwen3")
    assert "small qwen3" in found.untried
    assert not found.ways


def test_nothing_of_the_process_is_drawn() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    tried("qwen3")
    assert torch.equal(torch.rand(1), wanted)
    assert not torch.equal(tokens_of(8, 1), tokens_of(8, 2))
