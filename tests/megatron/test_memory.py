"""What is foretold of a Megatron rank's memory is what the real back end keeps: states to the byte, and what autograd
saves of a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.config.sections import MegatronSettings, WorkloadSettings
from gyre.workloads.memory.learners import ranks_of
from gyre.workloads.memory.passes import MARGIN, WITHOUT_A_DEVICE, need, tokens_of
from gyre.workloads.memory.rank import PassSize, megatron_ranks
from tests.memory_work import LENGTH, SEQUENCES, SHAPES, automatic, keeps, most
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

BFLOAT = {"dtype": "bfloat16"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, BFLOAT),
    "float32": ("qwen3", 1, {"dtype": "float32"}),
    "computed again": ("qwen3", 1, {**BFLOAT, "recompute": True}),
    "its own head": ("its own head", 1, BFLOAT),
    "qwen2": ("qwen2", 1, BFLOAT),
    "keys for each": ("keys for each", 1, BFLOAT),
    "two share a layer": ("qwen3", 2, {**BFLOAT, "tensor_parallel": 2}),
    "and a sequence": ("qwen3", 2, {**BFLOAT, "tensor_parallel": 2, "sequence_parallel": True}),
    "two replicas": ("qwen3", 2, BFLOAT),
    "two whole replicas": ("qwen3", 2, {**BFLOAT, "distributed_optimizer": False}),
    "two stages": ("qwen3", 2, {**BFLOAT, "pipeline_parallel": 2}),
}
BY_PREDICTED = 4 + 4 + 8 + 8 + 8 + 1
"""Bytes that the log-probs keep of each predicted token, beside its logits."""


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_keeps_is_foretold(pool: RankPool, case: str) -> None:
    name, ranks, own = CASES[case]
    shape, settings = SHAPES[name], MegatronSettings(**own)
    width = 4 if own["dtype"] == "float32" else 2
    found = pool.run(keeps, ranks, "megatron", shape, own)
    foretold = megatron_ranks(shape, settings, ranks=ranks, width=width)
    for mine, at in zip(foretold, (0, -1), strict=False):
        assert mine.static["weights"] == found[at]["weights"]
        assert mine.static["gradients"] == found[at]["gradients"]
        assert mine.static["gradients"] == pytest.approx(found[at]["buffers"], rel=0.05)
        # the ranges that replicas step are cut at whole blocks, not at parameters
        assert mine.static["optimizer"] == pytest.approx(found[at]["optimizer"], rel=0.01)
    if settings.pipeline_parallel > 1:
        return  # a stage's share is of several passes at once
    tokens = SEQUENCES * LENGTH
    said = width * foretold[0].columns * tokens + BY_PREDICTED * (tokens - 3 * SEQUENCES)
    # Cosines and sines are not saved where layers are computed again, but stay.
    near = 0.03 if settings.recompute else 0.02
    assert foretold[0].held(tokens) + said == pytest.approx(found[0]["saved"], rel=near)


def test_a_critic_has_no_logits(pool: RankPool) -> None:
    shape = SHAPES["qwen3"]
    (found,) = pool.run(keeps, 1, "megatron", shape, BFLOAT, None, True)
    (mine,) = megatron_ranks(shape, MegatronSettings(**BFLOAT), ranks=1, width=2, values=True)
    assert (mine.static["weights"], mine.static["gradients"]) == (found["weights"], found["gradients"])
    assert mine.held(SEQUENCES * LENGTH) == pytest.approx(found["saved"], rel=0.04)


@pytest.mark.parametrize(("recompute", "vocab"), [(False, 4096), (True, 320)])
def test_the_most_at_once_is_foretold(pool: RankPool, recompute: bool, vocab: int) -> None:
    """A vocabulary whose logits are most, and one whose are nothing."""
    own = {**BFLOAT, "recompute": recompute, "deterministic": False}
    shape = replace(SHAPES["qwen3"], hidden=192, mlp=512, vocab=vocab)
    settings = MegatronSettings(**own)
    (found,) = pool.run(most, 1, "megatron", shape, own, None, 192)
    (mine,) = megatron_ranks(shape, settings, ranks=1, width=2)
    foretold = mine.bytes_of(PassSize(SEQUENCES * 192, SEQUENCES)) - mine.static["workspaces"]
    assert foretold == pytest.approx(found, rel=0.15)


def test_auto_is_what_the_smallest_device_takes(pool: RankPool) -> None:
    shape, own = SHAPES["qwen3"], {**BFLOAT, "tensor_parallel": 2}
    small, large = 253 << 23, 269 << 23
    told = pool.run(automatic, 2, "megatron", shape, own, [large, small])
    ranks = ranks_of("megatron", shape, WorkloadSettings.read({"megatron": own}), ranks=2)
    (of_small, why), (of_large, _) = (
        tokens_of("auto", ranks, size, longest=1024, several=True) for size in (small, large)
    )
    assert of_small < of_large
    assert [tokens for tokens, *_ in told] == [of_small, of_small]
    assert told[1][1] == f"passes of {of_small} tokens: {why}"
    assert "another rank's device" in told[0][1]
    (alone,) = pool.run(automatic, 1, "megatron", shape, BFLOAT, [None])
    assert alone[0] == WITHOUT_A_DEVICE


def test_ranks_keep_activations_where_they_fit_the_smallest_device(pool: RankPool) -> None:
    """Two ranks, whose devices have either room: both do the same, what `gyre plan` would say of the smaller one, and a
    gang that starts again does so once more."""
    shape = SHAPES["qwen3"]
    own = {**BFLOAT, "tensor_parallel": 2, "recompute": "auto", "pass_tokens": 8192}
    settings = WorkloadSettings.read({"megatron": own})
    ranks = ranks_of("megatron", shape, settings, ranks=2)
    kept, again = (
        need([replace(one, recompute=on) for one in ranks], PassSize.of(8192, 1024), several=True).total
        for on in (False, True)
    )
    assert again < kept
    large, small = (int(size / (1 - MARGIN)) + 1 for size in (kept, kept - 1))
    cases = [([large, large], False), *[([large, small], True)] * 2, ([small, large], True)]
    for sizes, computed in cases:
        told = pool.run(automatic, 2, "megatron", shape, own, sizes)
        assert [(tokens, on) for tokens, _, on in told] == [(8192, computed)] * 2
        word = "computed again" if computed else "kept"
        assert all(f"activations are {word}: " in said for _, said, _ in told)
        assert [("another rank's device" in said) for _, said, _ in told] == [
            size > min(sizes) for size in sizes
        ]
    (alone,) = pool.run(automatic, 1, "megatron", shape, {**own, "tensor_parallel": 1}, [None])
    assert (alone[0], alone[2]) == (8192, False)
