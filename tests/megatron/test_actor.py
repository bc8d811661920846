"""The actor over real ranks: every layout does what plain torch does in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gyre.models.tensor_names import to_names
from gyre.workloads.base import WorkloadContext
from gyre.workloads.torch.actor import TorchActor
from tests.megatron import work
from tests.megatron.work import CONFIG, LAYOUTS, config_of, random_groups, take_step
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

STRAIGHT = {"lr": 1.0, "eps": 1.0, "clip_norm": 1e9, "warmup_steps": 0, "weight_decay": 0.0}
"""AdamW whose first step is nearly the gradient itself, so that weights tell of gradients."""

TERMS = {
    "loss_agg_mode": "seq-mean-token-mean",
    "kl_loss_coef": 0.1,
    "entropy_coeff": 0.05,
    "tis_imp_ratio_cap": 1.2,
    "adv_estimator": "rloo",
}


def plain_torch(config: dict[str, Any], steps: work.Steps) -> dict[str, Any]:
    """Plain torch in one process, each step's groups in a single micro-batch."""
    actor = TorchActor()
    actor.context = WorkloadContext("j", "actor", 0, 1, config=config)
    actor.setup()
    actor.warm_start()
    metrics = [take_step(actor, [[group for part in parts for group in part]]) for parts in steps]
    named = to_names(dict(actor.backend.model.named_parameters()), actor.backend.model.architecture)
    weights = {name: t.detach().numpy() for name, t in named.items()}
    return {"metrics": metrics, "weights": weights, "own": actor.step_logprobs(step=actor.step)}


STEPS = [
    [random_groups(0, 3), [], random_groups(3, 1), random_groups(4, 5)],
    [random_groups(9, 1), random_groups(10, 4)],
]
"""Micro-batches of unequal size, one of them empty; some ranks get nothing of some."""


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    return plain_torch({**CONFIG, "optim": STRAIGHT}, STEPS[:1])


@pytest.fixture(scope="module")
def adam() -> dict[str, Any]:
    return plain_torch(CONFIG, STEPS)


def same(found: dict[str, Any], wanted: dict[str, Any], atol: float = 1e-5) -> None:
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-5)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, expected in wanted["weights"].items():
        np.testing.assert_allclose(found["weights"][name], expected, atol=atol, rtol=0, err_msg=name)


def same_own_logprobs(results: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The ranks together have each sample's once."""
    told = [sample for result in results for sample in result["own"]["samples"].tolist()]
    lengths = [length for result in results for length in result["own"]["lengths"].tolist()]
    found = np.split(
        np.concatenate([result["own"]["logprobs"] for result in results]), np.cumsum(lengths)[:-1]
    )
    expected = np.split(wanted["own"]["logprobs"], np.cumsum(wanted["own"]["lengths"])[:-1])
    by_sample = {tuple(sample): values for sample, values in zip(told, found, strict=True)}
    assert len(by_sample) == len(told) == len(expected) > 0
    for sample, values in zip(wanted["own"]["samples"].tolist(), expected, strict=True):
        np.testing.assert_allclose(by_sample[tuple(sample)], values, atol=1e-4, err_msg=str(sample))


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_streamed_batch_is_plain_torchs(
    pool: RankPool, straight: dict[str, Any], layout: str
) -> None:
    ranks = LAYOUTS[layout][0]
    results = pool.run(work.train, ranks, config_of(layout, optim=STRAIGHT), STEPS[:1])
    same(results[0], straight)
    same_own_logprobs(results, straight)
    assert all(result["state"] == results[0]["state"] for result in results)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("layout", ["tp2-dp2", "tp2", "pp2", "dp2"])
def test_so_is_the_next_step(pool: RankPool, adam: dict[str, Any], layout: str) -> None:
    results = pool.run(work.train, LAYOUTS[layout][0], config_of(layout), STEPS)
    same(results[0], adam)
    assert results[0]["state"]["trained"] == [[0, 14]]


def test_every_term_of_the_loss_is_the_same_over_split_ranks(pool: RankPool) -> None:
    """Means of sequences, a KL term, an entropy bonus, truncated importance sampling, other advantages."""
    changes = {"loss": TERMS, "optim": STRAIGHT}
    expected = plain_torch({**CONFIG, **changes}, STEPS[:1])
    results = pool.run(work.train, 4, config_of("tp2-dp2", **changes), STEPS[:1])
    same(results[0], expected)
    assert {"kl", "tis_weight", "rollout_kl"} <= expected["metrics"][0].keys()


@pytest.mark.parametrize("layout", ["alone", "tp2-dp2"])
def test_what_would_be_a_small_pass_waits_for_the_next_micro_batch(pool: RankPool, layout: str) -> None:
    """A pass takes as long as its kernels take to be launched; the step is that of one large micro-batch."""
    config = config_of(layout)
    most = config["megatron"]["pass_tokens"] = 200
    groups = random_groups(0, 24)
    size = LAYOUTS[layout][0]  # a group for each rank
    parts = [groups[at : at + size] for at in range(0, 24, size)]
    streamed = pool.run(work.passes_of_a_step, LAYOUTS[layout][0], config, parts)
    whole = pool.run(work.passes_of_a_step, LAYOUTS[layout][0], config, [groups])
    for one, other in zip(streamed, whole, strict=True):
        *during, at_last = one["widths"]
        assert all(width >= most // 2 for widths in during for width in widths)
        assert len(at_last) <= 1, "no more than what makes a small pass is put off to the optimizer's step"
        assert one["predicted"] == other["predicted"] > 0
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-5)
    first, expected = streamed[0], whole[0]
    assert [] in first["widths"], "none of the micro-batches was too small for a pass"
    for name, weights in expected["weights"].items():
        np.testing.assert_allclose(first["weights"][name], weights, atol=1e-5, rtol=0, err_msg=name)


def test_a_pass_that_was_put_off_and_fails_leaves_nobody_waiting(pool: RankPool) -> None:
    config = config_of("dp2", collective_timeout_s=20.0)
    config["megatron"]["pass_tokens"] = 100_000
    failed, other = pool.run(work.a_loss_that_raises_late, 2, config)
    assert failed["told"] == "ValueError: a loss that does not like this sample"
    assert "another rank holds other micro-batches" in other["told"]
    assert failed["again"] == other["again"] == 1


def test_a_step_that_is_skipped_leaves_the_weights_and_the_next_step_is_whole(pool: RankPool) -> None:
    for told in pool.run(work.a_gradient_that_is_not_finite, 2, config_of("dp2")):
        assert told["refused"] == "actor.not_finite"
        assert told["skipped"] == told["again"] == {"step": 1, "skipped": 1}
        assert told["unchanged"]
        assert told["next"] == 2


def test_halved_passes_are_those_of_half_the_tokens(pool: RankPool) -> None:
    config, parts = config_of("alone"), [random_groups(0, 24)]
    config["megatron"]["pass_tokens"] = 400
    [halved] = pool.run(work.passes_of_a_step, 1, config, parts, 1)
    config["megatron"]["pass_tokens"] = 200
    [small] = pool.run(work.passes_of_a_step, 1, config, parts)
    assert halved["widths"] == small["widths"]
    assert halved["metrics"] == small["metrics"]


@pytest.mark.parametrize("layout", ["tp2-sequence", "pp2"])
def test_activations_are_computed_again_before_passes_are_halved_and_have_the_same_bits(
    pool: RankPool, layout: str
) -> None:
    config = config_of(layout)
    config["megatron"] |= {"pass_tokens": 400, "recompute": "auto"}
    ranks = LAYOUTS[layout][0]
    kept, again, halved = (
        pool.run(work.passes_of_a_step, ranks, config, [random_groups(0, 24)], times) for times in range(3)
    )
    sizes = [(400, False), (400, True), (200, True)]
    for *parts, whole in zip(kept, again, halved, kept, strict=True):
        said = [(one["begun"]["pass_tokens"], one["begun"]["recompute"]) for one in parts]
        assert said == sizes
        once_more = parts[1]
        assert once_more["widths"] == whole["widths"] != parts[2]["widths"]
        assert once_more["metrics"] == whole["metrics"]
        # Layer by layer in the backward pass the same is saved, and each layer's input before.
        assert once_more["saved"] > whole["saved"]
    for name, weights in kept[0]["weights"].items():
        assert np.array_equal(again[0]["weights"][name], weights), f"{name} has other bits"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("layout", ["alone", "tp2-sequence", "pp2", "dp2", "tp2-dp2", "recompute"])
def test_a_prompt_computed_once_has_the_step_of_its_copies_and_the_same_bits_again(
    pool: RankPool, layout: str
) -> None:
    """Groups of 16, of 2 and of 1; prompts longer than a pass, and one that is a token; a group that is cut over
    passes, and ranks whose trees are unequal."""
    config = config_of(layout, optim=STRAIGHT)
    config["megatron"]["pass_tokens"] = 60
    sizes = ((16, 20), (16, 9), (2, 17), (1, 9), (2, 70), (4, 1))
    groups = [random_groups(at, 1, n=n, prompt_tokens=length)[0] for at, (n, length) in enumerate(sizes)]
    found = []
    for once in (False, True, True):
        config["megatron"]["prompts_once"] = once
        found.append(pool.run(work.train_noting_nodes, LAYOUTS[layout][0], config, [groups[:4], groups[4:]]))
    for each, once, again in zip(*found, strict=True):
        assert each["nodes"] == 0
        assert once["nodes"] > 2
        same(once, each)
        np.testing.assert_allclose(once["own"], each["own"], atol=1e-5, rtol=0)
        assert again["digest"] == once["digest"]
        assert np.array_equal(again["own"], once["own"])


@pytest.mark.parametrize("layout", ["alone", "tp2-dp2"])
def test_calls_that_come_again_or_wrong_change_nothing(pool: RankPool, layout: str) -> None:
    results = pool.run(work.protocol, LAYOUTS[layout][0], config_of(layout))
    mismatch = "actor.micro_batch_mismatch"
    for told in results:
        assert told["too early"] == ["actor.step_gap"] * 2
        assert told["again"]
        assert told["groups"] == (4 if layout == "alone" else 2), "its own replica's"
        assert told["twice in a step"] == "trained_twice"
        assert told["other micro-batches"] == [mismatch] * 2
        assert told["unchanged"]
        assert told["begun anew"] == {"step": 1, "dropped": 1, "pass_tokens": 40}
        assert "has samples without a reward" in told["unscored"]
        assert told["changed"]
        assert told["applied again"] == [True] * 3
        assert told["trained twice"] == "trained_twice"
        assert told["half way"] == "a loss that fails half way"
        assert told["spoiled"] == [mismatch] * 2
        assert told["not finite"] == "actor.not_finite"
        assert told["still"]
        assert told["state"] == results[0]["state"]
        assert told["state"]["trained"] == [[0, 4]]


@pytest.mark.slow
def test_bfloat16_weights_learn_by_float32_ones(pool: RankPool) -> None:
    """Steps too small for bfloat16 add up: after six of them weights move that no single one would have moved."""
    steps = [[random_groups(at * 4, 4)] for at in range(6)]
    optim = {"lr": 2e-4, "warmup_steps": 0}
    found = {}
    for dtype in ("float32", "bfloat16"):
        config = config_of("tp2-dp2", optim=optim)
        config["megatron"]["dtype"] = dtype
        found[dtype] = pool.run(work.train_as_float, 4, config, steps)[0]
    start, full, rounded = (
        np.concatenate([found[dtype][what][name].ravel() for name in found["float32"]["start"]])
        for dtype, what in (("float32", "start"), ("float32", "weights"), ("bfloat16", "weights"))
    )
    # Where half a unit in the last place is more than a step, and the steps went one way.
    heavy = (np.abs(start) > 0.13) & (np.abs(full - start) > 1e-3)
    assert heavy.sum() > 100
    assert np.median((rounded - start)[heavy] / (full - start)[heavy]) == pytest.approx(1.0, abs=0.25)


def test_a_closed_actor_leaves_neither_its_model_nor_its_groups(pool: RankPool) -> None:
    pool.run(work.train, 2, config_of("tp2"), STEPS[:1])
    # Megatron makes 17 groups of three threads each, and keeps two of them until it makes the next.
    assert max(pool.run(work.threads, 2)) < 17


def test_a_layout_that_the_ranks_do_not_fill_and_a_second_actor_are_refused(pool: RankPool) -> None:
    (refusal,) = pool.run(work.refused_layout, 1, config_of("tp2"))[0]
    assert "1 ranks, not a multiple of tensor_parallel x pipeline_parallel (2 x 1)" in refusal
    (refusal,) = pool.run(work.refused_layout, 1, config_of("alone"))[0]
    assert "in a process group already" in refusal
