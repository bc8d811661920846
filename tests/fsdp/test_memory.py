"""What is foretold of an FSDP2 rank's memory is what the real back end keeps: states to the byte, and what autograd
saves of a pass."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config.sections import FsdpSettings, LoraSettings
from gyre.workloads.memory.rank import fsdp_rank
from tests.memory_work import LENGTH, SEQUENCES, SHAPES, keeps
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

BFLOAT = {"dtype": "bfloat16"}
SOME = {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj", "up_proj"]}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any] | None]] = {
    "one rank": ("qwen3", 1, BFLOAT, None),
    "float32": ("qwen3", 1, {"dtype": "float32"}, None),
    "computed again": ("qwen3", 1, {**BFLOAT, "recompute": True}, None),
    "its own head": ("its own head", 1, BFLOAT, None),
    "qwen2": ("qwen2", 1, BFLOAT, None),
    "keys for each": ("keys for each", 1, BFLOAT, None),
    "two ranks": ("qwen3", 2, BFLOAT, None),
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
    # Beside an adapter, the first norm has nothing before it that is trained. Cosines and sines of layers that are
    # computed again are not saved, but stay.
    near = 0.09 if own.get("recompute") or lora is not None else 0.02
    assert mine.held(tokens) + said == pytest.approx(found[0]["saved"], rel=near)


def test_a_critic_has_a_value_head(pool: RankPool) -> None:
    shape = SHAPES["qwen3"]
    (found,) = pool.run(keeps, 1, "fsdp", shape, BFLOAT, None, True)
    mine = fsdp_rank(shape, FsdpSettings(**BFLOAT), ranks=1, width=2, values=True)
    assert (mine.static["weights"], mine.static["gradients"]) == (found["weights"], found["gradients"])
    assert mine.held(SEQUENCES * LENGTH) == pytest.approx(found["saved"], rel=0.03)
