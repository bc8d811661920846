"""What is foretold of an FSDP2 rank's memory is what the real back end keeps: states to the byte, and what autograd
saves of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.config.sections import FsdpSettings, LoraSettings, WorkloadSettings
from gyre.workloads.memory import activations
from gyre.workloads.memory.learners import ranks_of
from gyre.workloads.memory.passes import MARGIN, WITHOUT_A_DEVICE, need, tokens_of
from gyre.workloads.memory.rank import PassSize, fsdp_rank
from tests.fsdp.learner_work import of_folder, runs_out_of_memory
from tests.megatron.work import random_groups
from tests.memory_work import LENGTH, SEQUENCES, SHAPES, automatic, keeps, most
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

BFLOAT = {"dtype": "bfloat16", "recompute": False}
SOME = {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj", "up_proj"]}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any] | None]] = {
    "one rank": ("qwen3", 1, BFLOAT, None),
    "float32": ("qwen3", 1, {"dtype": "float32", "recompute": False}, None),
    "computed again": ("qwen3", 1, {**BFLOAT, "recompute": True}, None),
    "its own head": ("its own head", 1, BFLOAT, None),
    "qwen2": ("qwen2", 1, BFLOAT, None),
    "keys for each": ("keys for each", 1, BFLOAT, None),
    "two ranks": ("qwen3", 2, BFLOAT, None),
    "by transformers' own parts": ("qwen3", 1, {**BFLOAT, "fused_kernels": False}, None),
    "an adapter": ("qwen3", 1, BFLOAT, {"rank": 8, "alpha": 16.0}),
    "an adapter of two ranks": ("qwen3", 2, BFLOAT, {"rank": 8, "alpha": 16.0}),
    "an adapter at some layers": ("qwen3", 1, BFLOAT, SOME),
    "an adapter, computed again": ("qwen3", 1, {**BFLOAT, "recompute": True}, {"rank": 8, "alpha": 16.0}),
}
BY_PREDICTED = 8 + 8
"""Bytes of each predicted token beside its hidden state: where it is, and which it is."""


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_keeps_is_foretold(pool: RankPool, case: str) -> None:
    name, ranks, own, lora = CASES[case]
    shape = SHAPES[name]
    width = 4 if own["dtype"] == "float32" else 2
    adapter = None if lora is None else LoraSettings(**lora)
    found = pool.run(keeps, ranks, "fsdp", shape, own, lora)
    mine = fsdp_rank(shape, FsdpSettings(**own), ranks=ranks, width=width, lora=adapter)
    assert {part: mine.static[part] for part in ("weights", "gradients", "optimizer")} == {
        part: found[0][part] for part in ("weights", "gradients", "optimizer")
    }
    tokens = SEQUENCES * LENGTH
    said = BY_PREDICTED * (tokens - 3 * SEQUENCES)
    # Cosines and sines of layers that are computed again are not saved, but stay.
    again = activations.angles(shape, width=width, whole=True) * tokens if own.get("recompute") else 0
    # Beside an adapter, the first norm has nothing before it that is trained.
    near = 0.09 if lora is not None else 0.02
    assert mine.held(tokens) + said - again == pytest.approx(found[0]["saved"], rel=near)


def test_a_critic_has_a_value_head(pool: RankPool) -> None:
    shape = SHAPES["qwen3"]
    (found,) = pool.run(keeps, 1, "fsdp", shape, BFLOAT, None, True)
    mine = fsdp_rank(shape, FsdpSettings(**BFLOAT), ranks=1, width=2, values=True)
    assert (mine.static["weights"], mine.static["gradients"]) == (found["weights"], found["gradients"])
    assert mine.held(SEQUENCES * LENGTH) == pytest.approx(found["saved"], rel=0.03)


@pytest.mark.parametrize(
    ("recompute", "vocab", "lora"),
    [
        (False, 4096, None),
        (True, 320, None),
        (False, 320, {"rank": 8, "alpha": 16.0}),
        (True, 4096, {"rank": 8, "alpha": 16.0}),
    ],
)
def test_the_most_at_once_is_foretold(
    pool: RankPool, recompute: bool, vocab: int, lora: dict[str, Any] | None
) -> None:
    """A vocabulary whose logits are most, and one whose are nothing."""
    own = {**BFLOAT, "recompute": recompute, "deterministic": False}
    shape = replace(SHAPES["qwen3"], hidden=192, mlp=512, vocab=vocab)
    settings = FsdpSettings(**own)
    (found,) = pool.run(most, 1, "fsdp", shape, own, lora, 192)
    adapter = None if lora is None else LoraSettings(**lora)
    mine = fsdp_rank(shape, settings, ranks=1, width=2, lora=adapter)
    foretold = mine.bytes_of(PassSize(SEQUENCES * 192, SEQUENCES)) - mine.static["workspaces"]
    assert foretold == pytest.approx(found, rel=0.15)


def test_auto_is_what_the_smallest_device_takes(pool: RankPool) -> None:
    shape, own = SHAPES["qwen3"], BFLOAT
    small, large = 253 << 23, 269 << 23
    told = pool.run(automatic, 2, "fsdp", shape, own, [large, small])
    ranks = ranks_of("fsdp", shape, WorkloadSettings.read({"fsdp": own}), ranks=2)
    (of_small, why), (of_large, _) = (
        tokens_of("auto", ranks, size, longest=1024, several=True) for size in (small, large)
    )
    assert of_small < of_large
    assert [tokens for tokens, *_ in told] == [of_small, of_small]
    assert told[1][1] == f"passes of {of_small} tokens: {why}"
    assert "another rank's device" in told[0][1]
    (alone,) = pool.run(automatic, 1, "fsdp", shape, BFLOAT, [None])
    assert alone[0] == WITHOUT_A_DEVICE


def test_ranks_keep_activations_where_they_fit_the_smallest_device(pool: RankPool) -> None:
    """Two ranks, whose devices have either room: both do the same, what `gyre plan` would say of the smaller one, and a
    gang that starts again does so once more."""
    shape = SHAPES["qwen3"]
    own = {"dtype": "bfloat16", "pass_tokens": 8192}
    settings = WorkloadSettings.read({"fsdp": own})
    ranks = ranks_of("fsdp", shape, settings, ranks=2)
    kept, again = (
        need([replace(one, recompute=on) for one in ranks], PassSize.of(8192, 1024), several=True).total
        for on in (False, True)
    )
    assert again < kept
    large, small = (int(size / (1 - MARGIN)) + 1 for size in (kept, kept - 1))
    cases = [([large, large], False), *[([large, small], True)] * 2, ([small, large], True)]
    for sizes, computed in cases:
        told = pool.run(automatic, 2, "fsdp", shape, own, sizes)
        assert [(tokens, on) for tokens, _, on in told] == [(8192, computed)] * 2
        word = "computed again" if computed else "kept"
        assert all(f"activations are {word}: " in said for _, said, _ in told)
        assert [("another rank's device" in said) for _, said, _ in told] == [
            size > min(sizes) for size in sizes
        ]
    (alone,) = pool.run(automatic, 1, "fsdp", shape, own, [None])
    assert (alone[0], alone[2]) == (8192, False)


def test_a_gang_without_memory_computes_activations_again_and_then_halves_its_passes(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    """In the middle of a step, which is then that of a gang that kept them, in passes of the same size."""
    config = of_folder(folder_of("qwen3"), fsdp={"pass_tokens": 200})
    parts = [random_groups(0, 12), random_groups(12, 8)]
    kept, again, halved = (
        pool.run(runs_out_of_memory, 2, config, parts, times) for times in ((0,), (0, 1), (0, 1, 2))
    )
    sizes = [(200, False), (200, True), (100, True)]
    for one, other, last in zip(kept, again, halved, strict=True):
        assert [(size["pass_tokens"], size["recompute"]) for size in last["begun"]] == sizes
        assert [size["dropped"] for size in last["begun"]] == [0, 1, 1]
        assert other["digest"] == one["digest"] != last["digest"]
        assert max(last["saved"][1:]) < 0.7 * last["saved"][0]
        assert not one["passes"].endswith("since a pass did not fit")
        assert other["passes"].endswith("They are computed again since a pass did not fit")
    (restarted, _) = pool.run(runs_out_of_memory, 2, config, parts, (1,))
    assert restarted["digest"] == kept[0]["digest"], "ranks that come back begin so"
    assert restarted["saved"] == again[0]["saved"][1:]
