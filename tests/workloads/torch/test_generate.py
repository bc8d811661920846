"""Sampling: reported log-probs are the model's, every sample has dice of its own, and repetition is bit-exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre.weights import WeightMismatch
from gyre.workloads.learner.errors import OlderWeights, WeightsNotLoaded
from gyre.workloads.learner.padded import TokenRow, pad_rows
from gyre.workloads.tasks.arithmetic import ArithmeticTask
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.reference import TorchReference
from gyre.workloads.torch.rollout import TorchRollout
from tests.workloads.padded_logprobs import token_logprobs
from tests.workloads.torch_workloads import CONFIG, bind


@pytest.fixture(scope="module")
def exported():
    return bind(TorchActor()).export_weights(version=3)


def serving(exported, **sampling):
    config = {**CONFIG, "sampling": {**CONFIG["sampling"], **sampling}}
    rollout = bind(TorchRollout(), config)
    rollout.load_weights(*exported)
    return rollout


def prompts(start, count):
    return ArithmeticTask(CONFIG).prompts(start, count)


def bits(groups):
    return [(s.token_ids.tobytes(), s.logprobs.tobytes(), s.finish_reason) for g in groups for s in g.samples]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_reported_logprobs_are_those_of_the_training_forward(exported, temperature):
    rollout = serving(exported, temperature=temperature)
    groups = rollout.generate(prompts(0, 12), step=1)
    model = bind(TorchActor()).backend.model
    for group in groups:
        batch = pad_rows([TokenRow(group.prompt_ids, s.token_ids) for s in group.samples])
        logprobs, _ = token_logprobs(model, batch, temperature)
        for sample, row in zip(group.samples, logprobs, strict=True):
            expected = row[: len(sample.token_ids)].detach().numpy()
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_the_reference_gives_its_own_policys_logprobs(exported):
    groups = serving(exported).generate(prompts(0, 5), step=1)
    reference = bind(TorchReference())
    with pytest.raises(WeightsNotLoaded):
        reference.logprobs(groups)
    reference.load_weights(*exported)
    for group in reference.logprobs(groups):
        for sample in group.samples:
            np.testing.assert_allclose(sample.extras["ref_logprobs"], sample.logprobs, atol=1e-5)


def test_a_repeated_call_gives_the_same_bits_and_leaves_its_argument_alone(exported):
    asked = prompts(0, 12)
    first = serving(exported).generate(asked, step=1)
    again = serving(exported).generate(asked, step=9)
    assert bits(first) == bits(again)
    assert all(group.samples == [] for group in asked)


def test_samples_do_not_depend_on_their_batch_neighbours(exported):
    together = serving(exported).generate(prompts(0, 12), step=1)
    alone = serving(exported).generate(prompts(5, 1), step=1)[0]
    in_pieces = serving(exported, max_rows=8).generate(prompts(0, 12), step=1)
    assert bits([alone]) == bits(together[5:6])
    assert bits(in_pieces) == bits(together)


def test_every_sample_has_dice_of_its_own(exported):
    groups = serving(exported, n=16).generate(prompts(0, 4), step=1)
    distinct = {s.token_ids.tobytes() for g in groups for s in g.samples}
    assert len(distinct) > 32


def test_samples_carry_their_version_and_end_where_they_say(exported):
    eos = ArithmeticTask(CONFIG).tokenizer.eos_id
    reasons = set()
    for group in serving(exported).generate(prompts(0, 40), step=1):
        assert group.versions == (3, 3)
        for sample in group.samples:
            reasons.add(sample.finish_reason)
            assert len(sample.token_ids) <= 4
            assert (sample.token_ids == eos).sum() == (sample.finish_reason == "stop")
            assert sample.finish_reason == "length" or sample.token_ids[-1] == eos
    assert reasons == {"stop", "length"}


def test_a_prompt_s_own_limit_is_kept_and_no_higher_one(exported):
    groups = prompts(0, 3)
    groups[1].meta["max_new_tokens"], groups[2].meta["max_new_tokens"] = 2, 900
    longest = [
        max(len(sample.token_ids) for sample in group.samples)
        for group in serving(exported, n=16).generate(groups, step=1)
    ]
    assert longest == [4, 2, 4]


def test_sampling_follows_the_distribution(exported):
    rollout = serving(exported, n=800, max_new_tokens=1, temperature=1.0)
    (group,) = rollout.generate(prompts(0, 1), step=1)
    counts = np.zeros(ArithmeticTask(CONFIG).tokenizer.vocab_size)
    probabilities = np.zeros_like(counts)
    for sample in group.samples:
        counts[sample.token_ids[0]] += 1
        probabilities[sample.token_ids[0]] = np.exp(sample.logprobs[0])
    spread = np.sqrt(800 * probabilities * (1 - probabilities)) + 1
    assert (np.abs(counts - 800 * probabilities) < 5 * spread).all()


def test_generating_before_any_weights_is_an_error_that_says_so():
    rollout = bind(TorchRollout())
    assert rollout.version is None
    with pytest.raises(WeightsNotLoaded, match="before any weights"):
        rollout.generate(prompts(0, 1), step=1)


def test_a_damaged_older_or_foreign_version_leaves_the_served_one(exported):
    rollout = serving(exported)
    manifest, buffer = exported
    assert rollout.load_weights(manifest, buffer) == 3
    damaged = bytes([buffer[0] ^ 1]) + buffer[1:]
    with pytest.raises(WeightMismatch, match="damaged"):
        rollout.load_weights({**manifest, "version": 4}, damaged)
    with pytest.raises(OlderWeights):
        rollout.load_weights({**manifest, "version": 2}, buffer)
    other = bind(TorchActor(), {**CONFIG, "seed": 12})
    with pytest.raises(WeightMismatch, match="is served with"):
        rollout.load_weights(*other.export_weights(version=3))
    smaller = bind(TorchActor(), {**CONFIG, "model": {**CONFIG["model"], "mlp": 32}})
    with pytest.raises(WeightMismatch, match="model settings"):
        rollout.load_weights(*smaller.export_weights(version=5))
    shallower = bind(TorchActor(), {**CONFIG, "model": {**CONFIG["model"], "layers": 1}})
    with pytest.raises(WeightMismatch, match="missing"):
        rollout.load_weights(*shallower.export_weights(version=5))
    assert rollout.version == 3
    assert rollout.load_weights(*other.export_weights(version=4)) == 4


def tokens_of(groups):
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def test_held_out_prompts_are_answered_greedily_unless_the_job_says_otherwise(exported):
    held = ArithmeticTask(CONFIG).held_out(8)
    greedy = serving(exported).evaluate(held)
    assert [group.id for group in greedy] == [group.id for group in held]
    assert {len(group.samples) for group in greedy} == {1}
    assert {sample.versions[0].version for group in greedy for sample in group.samples} == {3}
    assert not any(group.samples for group in held)
    settings = {"n": 3, "temperature": 1.0, "max_new_tokens": 2}
    drawn = [
        bind(TorchRollout(), {**CONFIG, "evaluation": settings, "sampling": {"n": 9, "max_new_tokens": 4}})
        for _ in range(2)
    ]
    for rollout in drawn:
        rollout.load_weights(*exported)
    first, again = (tokens_of(rollout.evaluate(held)) for rollout in drawn)
    assert first == again == tokens_of(drawn[0].evaluate(held))
    assert {len(samples) for samples in first} == {3}
    assert max(len(tokens) for samples in first for tokens in samples) == 2
    assert any(len({tuple(tokens) for tokens in samples}) > 1 for samples in first), "each has its own seed"
    assert serving(exported).evaluate([]) == []


def test_a_prompt_beyond_the_models_positions_is_refused(exported):
    config = {**CONFIG, "model": {**CONFIG["model"], "max_positions": 8}}
    rollout = bind(TorchRollout(), config)
    rollout.load_weights(*exported)
    with pytest.raises(IndexError, match="max_positions=8"):
        rollout.generate(prompts(0, 8), step=1)


def test_sampling_leaves_torch_on_one_thread():
    assert torch.get_num_threads() == 1
