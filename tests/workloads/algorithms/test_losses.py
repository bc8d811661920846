"""Losses against the formulas written out token by token; sums that may be cut anywhere; padding that is nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config.sections import (
    KL_TYPES,
    LOSS_AGG_MODES,
    DataSettings,
    LossSettings,
    RewardSettings,
    read_section,
)
from gyre.errors import ConfigError
from gyre.workloads.algorithms.losses import (
    kl_estimate,
    mini_batch_weight,
    policy_loss,
    token_weights,
    value_loss,
)
from tests.examples import examples

LENGTHS = (5, 1, 3, 2, 4, 5)
MASK = torch.arange(5)[None, :] < torch.tensor(LENGTHS)[:, None]
NORM = 7.0

EVERYTHING = LossSettings(
    clip_ratio_high=0.3, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coeff=0.02, tis_imp_ratio_cap=1.2
)


def tensors(dtype=torch.float64, seed=0):
    """Log-probs of the policy, the old one, the engine's, the reference's; advantages; entropies: `[6, 5]` each."""
    dice = torch.Generator().manual_seed(seed)
    logs = -3 * torch.rand(4, 6, 5, generator=dice, dtype=torch.float64)
    advantages = torch.randn(6, 5, generator=dice, dtype=torch.float64)
    entropies = torch.rand(6, 5, generator=dice, dtype=torch.float64)
    return [value.to(dtype) for value in (*logs, advantages, entropies)]


def loss_of(config, given, rows=slice(None), **changes):
    new, old, engine, reference, advantages, entropies = (value[rows] for value in given)
    options = {
        "old_logprobs": old,
        "rollout_logprobs": engine,
        "ref_logprobs": reference,
        "entropies": entropies,
        "norm_length": NORM,
    }
    return policy_loss(new, advantages, MASK[rows], config, **(options | changes))


def by_hand(config, given):
    """The same by the papers' formulas, in a loop over floats: the sum, and what it is divided by."""
    new, old, engine, reference, advantages, entropies = (value.double().tolist() for value in given)
    total = 0.0
    for row, length in enumerate(LENGTHS):
        weight = {
            "token-mean": 1.0,
            "seq-mean-token-mean": 1.0 / length,
            "seq-mean-token-sum": 1.0,
            "seq-mean-token-sum-norm": 1.0 / NORM,
        }[config.loss_agg_mode]
        for at in range(length):
            ratio = math.exp(new[row][at] - old[row][at])
            bounded = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
            token = -min(ratio * advantages[row][at], bounded * advantages[row][at])
            if config.tis_imp_ratio_cap:
                token *= min(math.exp(old[row][at] - engine[row][at]), config.tis_imp_ratio_cap)
            if config.kl_loss_coef:
                gap = new[row][at] - reference[row][at]
                token += (
                    config.kl_loss_coef
                    * {"k1": gap, "k2": gap**2 / 2, "k3": min(math.exp(-gap) - 1 + gap, 10.0)}[
                        config.kl_loss_type
                    ]
                )
            token -= config.entropy_coeff * entropies[row][at]
            total += weight * token
    return total, sum(LENGTHS) if config.loss_agg_mode == "token-mean" else len(LENGTHS)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kl", KL_TYPES)
@pytest.mark.parametrize("terms", ["all", "none"])
def test_the_loss_is_the_formula(dtype, close, mode, kl, terms):
    base = EVERYTHING if terms == "all" else LossSettings()
    config = base.model_copy(update={"loss_agg_mode": mode, "kl_loss_type": kl})
    given = tensors(dtype)
    found = loss_of(config, given)
    expected, weight = by_hand(config, given)
    assert found.loss.dtype is dtype
    assert found.loss.item() == pytest.approx(expected, rel=close, abs=close)
    assert found.weight.item() == weight
    assert found.metrics["tokens"].item() == sum(LENGTHS)
    assert mini_batch_weight(mode, tokens=sum(LENGTHS), sequences=len(LENGTHS)) == weight


@settings(max_examples=examples(40), deadline=None)
@given(
    cut=st.integers(0, 6),
    mode=st.sampled_from(LOSS_AGG_MODES),
    seed=st.integers(0, 99),
    order=st.permutations(range(6)),
)
def test_losses_gradients_and_metrics_of_pieces_sum_to_those_of_the_whole(cut, mode, seed, order):
    config = EVERYTHING.model_copy(update={"loss_agg_mode": mode})
    given = tensors(seed=seed)
    given[0].requires_grad_()
    whole = loss_of(config, given)
    (gradient,) = torch.autograd.grad(whole.loss, given[0])
    parts = [loss_of(config, given, list(rows)) for rows in (order[:cut], order[cut:])]
    (summed,) = torch.autograd.grad(sum(part.loss for part in parts), given[0])
    torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-12)
    assert sum(part.weight.item() for part in parts) == whole.weight.item()
    for name, value in whole.metrics.items():
        total = sum(part.metrics[name].item() for part in parts)
        assert total == pytest.approx(value.item(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_packed_tokens_have_the_loss_of_padded_rows(mode):
    config = EVERYTHING.model_copy(update={"loss_agg_mode": mode})
    given = tensors()
    rows = torch.arange(6)[:, None].expand(6, 5)
    new, old, engine, reference, advantages, entropies = (value.reshape(-1) for value in given)
    packed = policy_loss(
        new,
        advantages,
        MASK.reshape(-1),
        config,
        old_logprobs=old,
        rollout_logprobs=engine,
        ref_logprobs=reference,
        entropies=entropies,
        rows=rows.reshape(-1),
        norm_length=NORM,
    )
    padded = loss_of(config, given)
    assert packed.loss.item() == pytest.approx(padded.loss.item(), rel=1e-12)
    assert packed.weight.item() == padded.weight.item()


def test_the_clip_bounds_what_can_be_gained_and_not_what_can_be_lost():
    config = LossSettings(clip_ratio_low=0.2, clip_ratio_high=0.3)

    def loss(ratio, advantage):
        one = torch.ones(1, 1)
        found = policy_loss(math.log(ratio) * one, advantage * one, one.bool(), config, old_logprobs=0 * one)
        return found.loss.item(), found.metrics["clipped_low"].item(), found.metrics["clipped_high"].item()

    assert loss(1.0, 2.0) == (pytest.approx(-2.0), 0, 0)
    assert loss(2.0, 1.0) == (pytest.approx(-1.3), 0, 1)
    assert loss(0.5, -1.0) == (pytest.approx(0.8), 1, 0)
    assert loss(2.0, -1.0) == (pytest.approx(2.0), 0, 0)
    assert loss(0.5, 1.0) == (pytest.approx(-0.5), 0, 0)


def test_without_old_logprobs_the_gradient_is_that_of_reinforce():
    given = tensors()
    new, advantages = given[0].requires_grad_(), given[4]
    found = policy_loss(new, advantages, MASK, LossSettings())
    (gradient,) = torch.autograd.grad(found.loss, new)
    torch.testing.assert_close(gradient, torch.where(MASK, -advantages, 0.0), rtol=1e-12, atol=1e-12)
    assert found.metrics["ratio"].item() == sum(LENGTHS)


def test_truncated_importance_sampling_weighs_the_gradient_and_has_none_itself():
    given = tensors()
    new, engine, advantages = given[0].requires_grad_(), given[2], given[4]
    config = LossSettings(tis_imp_ratio_cap=1.5)
    found = policy_loss(new, advantages, MASK, config, rollout_logprobs=engine)
    (gradient,) = torch.autograd.grad(found.loss, new)
    weight = (new.detach() - engine).exp().clamp(max=1.5)
    torch.testing.assert_close(gradient, torch.where(MASK, -advantages * weight, 0.0), rtol=1e-12, atol=1e-12)
    assert found.metrics["tis_capped"].item() == ((weight == 1.5) & MASK).sum().item() > 0


def test_kl_estimates_are_what_they_are_called():
    """Over a whole distribution: k1 and k3 have the divergence as expectation, k2's gradient is the divergence's."""
    dice = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, 9, generator=dice, dtype=torch.float64) / 2
    logits.requires_grad_()
    p, q = logits.log_softmax(0), other.log_softmax(0)
    divergence = (p.exp() * (p - q)).sum()
    (slope,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def expected(kind):
        return (p.exp().detach() * kl_estimate(p, q, kind)).sum()

    assert expected("k1").item() == pytest.approx(divergence.item(), rel=1e-12)
    assert expected("k3").item() == pytest.approx(divergence.item(), rel=1e-12)
    (k1_slope,) = torch.autograd.grad(expected("k1"), logits, retain_graph=True)
    (k2_slope,) = torch.autograd.grad(expected("k2"), logits)
    torch.testing.assert_close(k1_slope, torch.zeros_like(slope), rtol=0, atol=1e-12)
    torch.testing.assert_close(k2_slope, slope, rtol=1e-10, atol=1e-12)
    assert (kl_estimate(p, p, "k3") == 0).all()
    assert (kl_estimate(p, q, "k3") >= 0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_what_stands_at_padding_does_not_matter_even_when_it_is_not_finite(mode):
    config = EVERYTHING.model_copy(update={"loss_agg_mode": mode})
    clean = tensors()
    for bad in (float("-inf"), float("nan"), 1e30):
        dirty = [torch.where(MASK, value, bad) for value in clean]
        dirty[0].requires_grad_()
        found = loss_of(config, dirty)
        (gradient,) = torch.autograd.grad(found.loss, dirty[0])
        assert found.loss.item() == loss_of(config, clean).loss.item()
        assert (gradient[~MASK] == 0).all()
        assert gradient.isfinite().all()
        assert all(value.isfinite() for value in found.metrics.values())


def test_the_value_loss_is_the_worse_of_the_free_and_the_held_one():
    dice = np.random.default_rng(0)
    values, old, returns = (torch.from_numpy(dice.normal(size=(6, 5))) for _ in range(3))
    found = value_loss(values, old, returns, MASK, LossSettings(cliprange_value=0.4))
    expected = 0.0
    for v, o, r, kept in zip(*(t.reshape(-1).tolist() for t in (values, old, returns, MASK)), strict=True):
        held = min(max(v, o - 0.4), o + 0.4)
        expected += 0.5 * max((v - r) ** 2, (held - r) ** 2) * kept
    assert found.loss.item() == pytest.approx(expected, rel=1e-12)
    assert found.weight.item() == sum(LENGTHS)
    assert found.metrics["value_clipped"].item() > 0


def test_sequences_without_a_token_are_not_counted():
    mask = torch.tensor([[True, True], [False, False]])
    config = LossSettings(loss_agg_mode="seq-mean-token-mean")
    assert policy_loss(torch.zeros(2, 2), torch.ones(2, 2), mask, config).weight.item() == 1
    assert token_weights(mask, "seq-mean-token-mean", dtype=torch.float64).tolist() == [[0.5, 0.5], [0, 0]]


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (LossSettings(kl_loss_coef=0.1), "ref_logprobs"),
        (LossSettings(tis_imp_ratio_cap=2.0), "rollout_logprobs"),
        (LossSettings(entropy_coeff=0.1), "entropies"),
        (LossSettings(loss_agg_mode="seq-mean-token-sum-norm"), "norm_length"),
    ],
)
def test_a_term_without_its_tensor_is_refused(config, missing):
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match=missing):
        policy_loss(ones, ones, ones.bool(), config)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"loss_agg_mode": "token_mean"}, r"loss_agg_mode: 'token_mean' .*did you mean 'token-mean'"),
        (
            {"adv_estimator": "reinforce"},
            r"adv_estimator: 'reinforce' is neither a known advantage estimator nor",
        ),
        ({"kl_loss_type": "k4"}, "kl_loss_type"),
        ({"lam": 1.5}, r"config\.loss\.lam: 1\.5 should be less"),
        ({"clip_ratio_low": 2.0}, "clip_ratio_low"),
        ({"kl_loss_coef": -1.0}, r"kl_loss_coef: -1\.0 should be greater"),
        ({"cliprange_value": 0.0}, "cliprange_value"),
    ],
)
def test_settings_out_of_range_are_named(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read_section(LossSettings, {"loss": wrong}, "loss")


@pytest.mark.parametrize(
    ("settings_class", "page"),
    [(LossSettings, "algorithms"), (RewardSettings, "rewards"), (DataSettings, "data")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_setting_is_documented(settings_class, page):
    text = (Path(__file__).parents[3] / "docs" / f"{page}.md").read_text()
    missing = [name for name in settings_class.model_fields if f"{name}`" not in text]
    assert missing == []


# -- outliers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", KL_TYPES)
@pytest.mark.parametrize("distance", [100.0, -100.0, 1e30, -1e30])
def test_one_outlier_token_has_a_finite_loss_and_gradient(kl, distance):
    """Of 20 tokens one is as far from all other policies as float32 can tell, in either direction."""
    config = EVERYTHING.model_copy(update={"kl_loss_type": kl})
    new, old, engine, reference, advantages, entropies = tensors(torch.float32)
    for value in (old, engine, reference):
        value[0, 0] = new[0, 0] - distance
    engine[1, 0] = old[1, 0] - distance
    new = new.requires_grad_()
    found = loss_of(config, (new, old, engine, reference, advantages, entropies))
    found.loss.backward()
    assert math.isfinite(found.loss.item())
    assert all(math.isfinite(value.item()) for value in found.metrics.values())
    assert torch.isfinite(new.grad).all()
    assert new.grad[MASK].count_nonzero() >= MASK.sum() - 2, "the other tokens are still learned from"


def test_what_is_no_number_stays_so_in_loss_and_gradient():
    given = tensors(torch.float32)
    given[1][0, 0] = math.nan
    given[0].requires_grad_()
    found = loss_of(LossSettings(), given)
    found.loss.backward()
    assert math.isnan(found.loss.item())
    assert given[0].grad[0, 0].isnan()


def test_the_bounds_are_those_of_verl():
    apart = torch.tensor([[25.0, -25.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = policy_loss(apart, torch.ones(1, 2), mask, LossSettings(), old_logprobs=torch.zeros(1, 2))
    assert found.metrics["ratio"].item() == pytest.approx(math.exp(20.0) + math.exp(-20.0))
    assert kl_estimate(apart, torch.zeros(1, 2), "k3").tolist() == [[10.0, 10.0]]
    assert kl_estimate(apart, torch.zeros(1, 2), "k1").tolist() == [[20.0, -20.0]]
