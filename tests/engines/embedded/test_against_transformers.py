"""The engine's log-probs are those of transformers' models, for each family; skipped where it is not installed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.engines.embedded.tiny import CONFIGS, Model, ask, run, write_checkpoint

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_log_probs_are_those_of_transformers(tmp_path, name):
    folder = write_checkpoint(tmp_path, name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = random.Random(1)
    asked = [
        ask([draw.randrange(1, 96) for _ in range(length)], 12, seed=length, rid=f"r{length}")
        for length in (1, 7, 70)
    ]
    run(Model(folder).core(), *asked)
    for each in asked:
        with torch.no_grad():
            logits = theirs(torch.tensor([each.request.tokens])).logits[0]
        rows = torch.log_softmax(logits[each.request.prompt_length - 1 : -1].float(), dim=-1)
        expected = rows[torch.arange(12), torch.tensor(each.tokens)]
        np.testing.assert_allclose(each.logprobs, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    folder = write_checkpoint(tmp_path, name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = ask([5, 17, 80, 33], 24, temperature=0.0)
    run(Model(folder).core(), asked)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([[5, 17, 80, 33]]),
            attention_mask=torch.ones(1, 4, dtype=torch.int64),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert asked.tokens == expected[0, 4:].tolist()
