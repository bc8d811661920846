"""*Batch invariance*: the bits of a sample do not depend on the crowd, the slot or where it was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.engines.embedded.invariance import KeyLengths, measure
from tests.engines.embedded.tiny import CONFIGS, Model, ask, plain_logits, run, write_checkpoint
from tests.examples import examples

MANY = settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
PROMPTS = st.lists(
    st.tuples(
        st.integers(1, 240),  # tokens of the prompt
        st.integers(1, 24),  # new ones
        st.sampled_from([1.0, 0.6, 0.0]),
        st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.02}]),
    ),
    min_size=2,
    max_size=9,
)


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request, tmp_path_factory):
    return Model(write_checkpoint(tmp_path_factory.mktemp("model"), request.param))


def tokens_of(index, length):
    # Every third shares its prompt's start with others, so that prefixes are shared.
    return [1 + (7 * position + (index if index % 3 else 0)) % 95 for position in range(length)]


def asked_for(prompts):
    return [
        ask(tokens_of(index, length), new, seed=index, rid=f"r{index}", temperature=temperature, **cut)
        for index, (length, new, temperature, cut) in enumerate(prompts)
    ]


@MANY
@given(prompts=PROMPTS, chosen=st.integers(0, 100), cut_at=st.floats(0, 1))
def test_alone_in_a_crowd_and_continued_are_the_same_bits(model, prompts, chosen, cut_at):
    crowd = asked_for(prompts)
    run(model.core(max_running=4), *crowd)
    chosen %= len(prompts)
    alone = asked_for(prompts)[chosen]
    run(model.core(max_running=16, prefill_tokens=64), alone)
    assert alone.bits == crowd[chosen].bits

    length, new, temperature, cut = prompts[chosen]
    k = int(cut_at * (new - 1))
    rest = ask(
        tokens_of(chosen, length) + alone.tokens[:k], new - k, seed=chosen, temperature=temperature, **cut
    )
    run(model.core(max_running=2), ask(tokens_of(50, 30), 20, rid="other"), rest)
    assert rest.bits == alone.bits[k:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_sample_cut_anywhere_goes_on_with_the_same_bits(tmp_path, dtype):
    """Past 512 keys, which is where torch's attention starts another block."""
    model = Model(write_checkpoint(tmp_path, "qwen2"), dtype)
    prompt = tokens_of(0, 370)
    whole = ask(prompt, 250, seed=3)
    run(model.core(), whole, *(ask(tokens_of(i, 20 * i), 100, seed=i, rid=f"o{i}") for i in range(1, 8)))
    for k in (1, 13, 140, 143, 249):
        rest = ask(prompt + whole.tokens[:k], 250 - k, seed=3)
        run(model.core(prefill_tokens=300), rest)
        assert rest.bits == whole.bits[k:]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_log_probs_are_those_of_a_plain_forward(tmp_path, name):
    folder = write_checkpoint(tmp_path, name)
    asked = [
        ask(tokens_of(i, 30 * i + 1), 10, seed=i, rid=f"r{i}", temperature=t, top_p=p)
        for i, (t, p) in enumerate([(1.0, 1.0), (0.7, 1.0), (1.3, 0.9), (0.0, 1.0)])
    ]
    run(Model(folder).core(), *asked)
    for each in asked:
        logits = plain_logits(folder, each.request.tokens)[each.request.prompt_length - 1 : -1]
        scaled = torch.log_softmax(logits / (each.request.sampling.temperature or 1.0), dim=-1)
        expected = scaled[torch.arange(10), torch.tensor(each.tokens)]
        np.testing.assert_allclose(each.logprobs, expected.numpy(), atol=1e-5)
        if each.request.sampling.temperature == 0:
            assert each.tokens == logits.argmax(dim=-1).tolist()


def test_another_seed_draws_other_tokens(model):
    asked = [ask(tokens_of(0, 9), 24, seed=seed, rid=f"r{seed}") for seed in (1, 1, 2)]
    run(model.core(), *asked)
    once, again, other = (each.tokens for each in asked)
    assert once == again != other


@given(st.sampled_from(["fine", "blocked"]), st.integers(1, 5000))
def test_key_lengths_cover_grow_and_avoid_what_is_cut_otherwise(name, length):
    lengths = KeyLengths(name)
    covering = lengths.covering(length)
    assert covering >= length
    assert covering % 16 == 0
    assert lengths.covering(covering) == covering
    assert lengths.covering(length + 1) >= covering
    if name == "blocked":
        assert not 192 < covering % 512 < 384


def test_what_cannot_be_shown_falls_back_to_what_holds_by_construction(monkeypatch):
    module = "gyre.engines.embedded.invariance"
    monkeypatch.setattr(f"{module}._rows_agree", lambda *_: False)
    monkeypatch.setattr(f"{module}._keys_agree", lambda *_: False)
    scheme = measure(
        [(torch.zeros(4, 4), None)],
        group=1,
        kv_heads=1,
        head_dim=4,
        most_rows=80,
        context_length=1000,
    )
    assert scheme.fewest_rows == 80
    assert {scheme.key_lengths.covering(length) for length in (1, 500, 1000)} == {1024}


def test_the_fallback_too_gives_the_same_bits(model, monkeypatch):
    cheap = ask(tokens_of(1, 40), 12, seed=5)
    run(model.core(), cheap)
    module = "gyre.engines.embedded.invariance"
    monkeypatch.setattr(f"{module}._rows_agree", lambda *_: False)
    monkeypatch.setattr(f"{module}._keys_agree", lambda *_: False)
    alone, crowded = ask(tokens_of(1, 40), 12, seed=5), ask(tokens_of(1, 40), 12, seed=5)
    run(model.core(), alone)
    run(model.core(), *(ask(tokens_of(i, 30), 20, seed=i, rid=f"o{i}") for i in range(3)), crowded)
    assert alone.bits == crowded.bits
    assert alone.tokens == cheap.tokens
