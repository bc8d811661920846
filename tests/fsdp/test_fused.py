"""What replaces parts of a model says what they say, with their gradient; and only where they are the usual ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from gyre.models.small_model import small_model, tokens_of
from gyre.workloads.fsdp.fused import fusable, fuse
from gyre.workloads.fsdp.small_check import try_small

USUAL = {
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb"},
    "llama": {"LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"},
    "qwen3_moe": {"Qwen3MoeRMSNorm", "apply_rotary_pos_emb"},
    "phi3": {"Phi3RMSNorm", "apply_rotary_pos_emb"},
    "gemma3_text": {"apply_rotary_pos_emb"},  # its norm adds one to its weight, its unit is another
    "glm4": {"Glm4RMSNorm"},  # it rotates pairs, and half of a head
    "gpt2": set[str](),
}
CPU = torch.device("cpu")


@pytest.fixture
def fused(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Two models with the same weights, the second of them fused."""
    config = AutoConfig.for_model(request.param)
    own, mine = (small_model(config, attention=None, seed=1) for _ in range(2))
    undo = fuse(mine, fusable(mine))
    yield own, mine
    undo()


@pytest.mark.parametrize("kind", USUAL)
def test_the_usual_parts_are_found_and_no_others(kind: str) -> None:
    model = small_model(AutoConfig.for_model(kind), attention=None, seed=1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    drawn_from = torch.get_rng_state()
    assert {name.rpartition(".")[2] for name in fusable(model)} == USUAL[kind]
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn_from), "nothing is drawn from the process's own generator"


@pytest.mark.parametrize("fused", ["qwen3", "qwen3_moe", "phi3"], indirect=True)
def test_logits_and_gradients_stay(fused: tuple[nn.Module, nn.Module]) -> None:
    def said(model: nn.Module) -> list[Tensor]:
        ids = tokens_of(40, 2)[None]
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()  # type: ignore[no-untyped-call]
        return [logits, *(one.grad for one in model.parameters() if one.grad is not None)]

    own, mine = fused
    replaced = [module for module in mine.modules() if "forward" in vars(module)]
    assert replaced
    for theirs, ours in zip(said(own), said(mine), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_that_says_something_else_then_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("qwen3")
    tried = try_small(config, attention="auto", values=False, device=CPU, seed=1, fuses=True)
    assert {name.rpartition(".")[2] for name in tried.fused} == USUAL["qwen3"]
    monkeypatch.setattr("gyre.workloads.fsdp.fused.gated_unit", lambda gate, up: gate * up)
    monkeypatch.setattr("gyre.workloads.fsdp.fused._says_the_same", lambda *_: True)
    tried = try_small(config, attention="auto", values=False, device=CPU, seed=1, fuses=True)
    assert not tried.fused
    assert tried.ways, "it is tried as it is"
